"""LabelSmoothing against torch's own label smoothing: on its two events, and in training."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support import make_trainer
from torch import nn

import hocket
from hocket.hookspecs import Event
from hocket.state.task import SupervisedTask
from hocket_general import LabelSmoothing
from hocket_testkit import run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.1, 0.0], [1.0, 1.0, 4.0]])


def _run(algorithm, batch, outputs=LOGITS, loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1])):
    """The two events around a loss, as the loop has them; returns the loss and the state afterwards."""
    state = SimpleNamespace(task=None, batch=batch, outputs=outputs)
    algorithm.apply(Event.BEFORE_LOSS, state)
    value = loss(state.outputs, state.batch)
    algorithm.apply(Event.AFTER_LOSS, state)
    return value, state


def test_the_loss_is_torchs_with_label_smoothing_and_the_targets_come_back():
    inputs, targets = torch.zeros(3, 1), torch.tensor([0, 1, 2])
    value, state = _run(LabelSmoothing(0.2), (inputs, targets))
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, targets, label_smoothing=0.2))
    assert state.batch[0] is inputs and state.batch[1] is targets
    assert targets.tolist() == [0, 1, 2]


class Labelled(NamedTuple):
    inputs: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("key", ["label", 1])
def test_targets_in_a_field_of_a_named_tuple(key):
    batch = Labelled(torch.zeros(3, 1), torch.tensor([0, 1, 2]))

    def loss(outputs, batch):
        return F.cross_entropy(outputs, batch.label)

    value, state = _run(LabelSmoothing(0.2, target_key=key), batch, loss=loss)
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, batch.label, label_smoothing=0.2))
    assert type(state.batch) is Labelled and state.batch.label is batch.label


def test_the_batch_of_the_user_is_not_changed():
    targets = torch.tensor([0, 1, 2])
    batch = [torch.zeros(3, 1), targets]
    _run(LabelSmoothing(), batch)
    assert batch[1] is targets


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_a_mean_over_positions_that_count(ignore_index):
    targets = torch.tensor([0, ignore_index, 2])
    value, _ = _run(LabelSmoothing(0.1, ignore_index=ignore_index), (None, targets))
    expected = F.cross_entropy(LOGITS, targets, ignore_index=ignore_index, label_smoothing=0.1)
    torch.testing.assert_close(value, expected)


def test_probability_targets_and_named_targets():
    dense = torch.softmax(LOGITS.flip(0), 1)
    value, state = _run(
        LabelSmoothing(0.3, target_key="label"),
        {"x": 1, "label": dense},
        loss=lambda o, b: F.cross_entropy(o, b["label"]),
    )
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, dense * 0.7 + 0.1))
    assert state.batch["label"] is dense


def test_outputs_without_logits_are_an_error_that_says_what_to_do():
    with pytest.raises(TypeError, match=r"found dict and Tensor\. .*smooth_labels in the loss of a hocket\.Task"):
        _run(LabelSmoothing(), (None, torch.tensor([0])), outputs={"loss": torch.tensor(0.0)})


@pytest.mark.parametrize("smoothing", [-0.1, 1.1])
def test_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        LabelSmoothing(smoothing)


# --- in training, against torch on the whole batch

CLASSES = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
FLAT = torch.tensor([-100, -100, -100, 0, 1, -100, 2])
MAPS = torch.tensor([[0, -100], [-100, -100], [-100, -100], [2, 1], [1, 0], [-100, 2]])


def _model(targets):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3) if targets.dim() == 1 or targets.is_floating_point() else nn.Conv1d(4, 3, 1)
    return layer.double()


def _step(loss, targets, microbatch=None, **changes):
    """Take one step with label-smoothing by 0.1, of which the weights are the start less the gradient."""
    model = changes.pop("model", None) or _model(targets)
    inputs = _inputs(targets)
    trainer = make_trainer(
        model=model, loss=loss, train_data=[(inputs, targets)], microbatch=microbatch, optimizer="sgd(lr=1.0)",
        duration="1ep", device="cpu", algorithms=changes.pop("algorithms", ["label-smoothing"]), **changes,
    )  # fmt: skip
    trainer.fit()
    return trainer


def _inputs(targets):
    trailing = () if targets.is_floating_point() else targets.shape[1:]
    return torch.randn(len(targets), 4, *trailing, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _assert_gradient_is(trainer, targets, loss):
    model = _model(targets)
    value = loss(model(_inputs(targets)), targets)
    value.backward()
    for ours, theirs in zip(trainer.model_state_dict().values(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, (theirs - theirs.grad).detach())
    torch.testing.assert_close(trainer.state.loss, value.detach())


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("targets", [FLAT, MAPS], ids=["labels", "maps"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: "cross_entropy", {}),
        (lambda: functools.partial(F.cross_entropy, weight=CLASSES), {"weight": CLASSES}),
        (lambda: nn.CrossEntropyLoss(CLASSES), {"weight": CLASSES}),
        (lambda: nn.CrossEntropyLoss(ignore_index=255), {"ignore_index": 255}),
        (lambda: nn.CrossEntropyLoss(CLASSES, ignore_index=0), {"ignore_index": 0, "weight": CLASSES}),
        (lambda: nn.CrossEntropyLoss(CLASSES, reduction="sum"), {"reduction": "sum", "weight": CLASSES}),
    ],
    ids=["name", "partial", "weights", "255", "0", "sum"],
)
def test_cross_entropy_is_torchs_with_label_smoothing(make, options, targets, microbatch):
    targets = targets.where(targets != -100, options.get("ignore_index", -100))
    loss = make()
    trainer = _step(loss, targets, microbatch, eval_data=[(_inputs(targets), targets)])
    _assert_gradient_is(trainer, targets, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1, **options))
    if "reduction" not in options:  # evaluation does not smooth, and the loss is as it was given
        logits = trainer.state.model(_inputs(targets))
        assert trainer.evaluate()["eval/loss"] == pytest.approx(F.cross_entropy(logits, targets, **options).item())
    assert getattr(loss, "label_smoothing", 0.0) == 0.0 and trainer.state.task.loss_function in (loss, F.cross_entropy)


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_class_probabilities_and_class_weights(smoothing, microbatch):
    targets = torch.softmax(torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1)
    loss = nn.CrossEntropyLoss(CLASSES)
    trainer = _step(loss, targets, microbatch, algorithms=[LabelSmoothing(smoothing)])
    expected = functools.partial(F.cross_entropy, weight=CLASSES, label_smoothing=smoothing)
    _assert_gradient_is(trainer, targets, expected)


class _Own(hocket.Task):
    """A task whose loss gets the smoothed targets."""

    def __init__(self, targets):
        super().__init__()
        self.model = _model(targets)

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("targets", [FLAT, MAPS], ids=["labels", "maps"])
def test_other_losses_are_weighted_by_the_labels_that_count(targets, microbatch):
    trainer = _step(None, targets, microbatch, model=_Own(targets))
    _assert_gradient_is(trainer, targets, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1))


def test_other_losses_that_sum_are_refused_where_they_are_divided():
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    targets = torch.tensor([0, 1, 2, 1])
    _assert_gradient_is(
        _step(loss, targets), targets, functools.partial(F.cross_entropy, label_smoothing=0.1, reduction="sum")
    )
    with pytest.raises(ValueError, match="this is a sum over samples and not a mean"):
        _step(loss, targets, 2)


def test_an_exception_of_the_loss_leaves_it_as_it_was():
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        task = SupervisedTask(_model(FLAT), loss)
        with pytest.raises(IndexError):
            _step(None, torch.tensor([0, 1, 7]), model=task)
        assert task.loss_function is loss and getattr(loss, "label_smoothing", 0.0) == 0.0


def _focal(outputs, targets):
    likelihoods = outputs.log_softmax(1).gather(1, targets[:, None])
    return -((1 - likelihoods.exp()) ** 2 * likelihoods).mean()


@pytest.mark.parametrize("loss", [F.nll_loss, nn.NLLLoss(), _focal])
def test_losses_of_class_indices_only_are_an_error_that_says_what_to_do(loss):
    with pytest.raises(
        TypeError, match=r"^label-smoothing gives .* takes indices only .*loss=torch.nn.functional.cross_e"
    ):
        _step(loss, torch.tensor([0, 1, 2]), model=nn.Sequential(_model(FLAT), nn.LogSoftmax(1)))


def test_another_ignore_index_than_the_loss_has_is_an_error():
    with pytest.raises(ValueError, match=r"ignore_index=255, and the loss ignores -100. .*ignore_index=255\)"):
        _step(nn.CrossEntropyLoss(), FLAT, algorithms=[LabelSmoothing(ignore_index=255)])


def test_ranks_train_as_torch_does_on_all_their_samples():
    """The second rank has two labels, the first has three."""
    pytest.importorskip("hocket_strategies")
    losses = [nn.CrossEntropyLoss(CLASSES), None]

    def train(rank):
        data = MAPS[rank::2]
        found = []
        for loss in losses:
            torch.manual_seed(0)
            model = _model(MAPS) if loss else _Own(MAPS)
            trainer = make_trainer(
                model=model, loss=loss, train_data=[(_inputs(MAPS)[rank::2], data)], optimizer="sgd(lr=1.0)", duration="1ep",
                device="cpu", strategy={"ddp": {"split_data": False}}, microbatch=2, algorithms=["label-smoothing"],
            )  # fmt: skip
            trainer.fit()
            found.append([value.numpy() for value in trainer.model_state_dict().values()])
        return found

    for ranks in run_ranks(train, 2):
        for found, weight in zip(ranks, (CLASSES, None), strict=True):
            model = _model(MAPS)
            F.cross_entropy(model(_inputs(MAPS)), MAPS, label_smoothing=0.1, weight=weight).backward()
            for ours, theirs in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(torch.from_numpy(ours), (theirs - theirs.grad).detach())
