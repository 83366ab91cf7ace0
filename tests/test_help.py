"""What help for mistakes costs, and what it must not change: later steps, types of errors, and metrics by name."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import pickle
import re
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer, same
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hocket
from hocket.help import names
from hocket.help.attributes import Values
from hocket.loop.actions import DefaultActions
from hocket.plugins import signatures
from hocket.state.simple_metrics import METRICS
from hocket.state.task import SupervisedTask
from hocket_insight.failures import explaining as failures


def test_only_the_first_loss_of_a_fit_is_checked() -> None:
    checked = []

    class Watch(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            (actions,) = (each.obj for each in state.bus.attachments if isinstance(each.obj, DefaultActions))
            checked.append(actions.first_loss is not None)

    make_trainer(callbacks=[Watch()]).fit()
    assert checked == [True] + [False] * 5


def test_checking_the_first_loss_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = make_trainer(model=make_model(dropout=0.5), seed=3)
    checked.fit()
    monkeypatch.setattr("hocket_insight.first_loss.checked", lambda state: nullcontext())
    plain = make_trainer(model=make_model(dropout=0.5), seed=3)
    plain.fit()
    assert same(checked.model_state_dict(), plain.model_state_dict())


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_written_loss_that_broadcasts_is_said(shape: tuple[int, ...]) -> None:
    data = [(torch.randn(8, 8), torch.randn(8) if len(shape) == 2 else torch.randn(8, 1))] * 2
    model = nn.Sequential(nn.Linear(8, 1), nn.Unflatten(1, (1,)) if len(shape) == 2 else nn.Flatten(0))
    with pytest.warns(UserWarning, match="each output is compared with every target.*outputs.squeeze"):
        make_trainer(train_data=data, model=model, loss=lambda o, t: (o - t).square().mean()).fit()


def test_pairs_on_purpose_are_left_alone() -> None:
    data = [(torch.randn(8, 8), torch.randn(8))] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(train_data=data, model=nn.Linear(8, 1), loss=lambda o, t: (o - o.T).square().mean()).fit()


def test_probabilities_in_cross_entropy_are_said() -> None:
    model = nn.Sequential(make_model(), nn.Softmax(1))
    with pytest.warns(UserWarning, match=r"\(32, 3\) are probabilities.*Remove the softmax"):
        make_trainer(model=model).fit()


class Written(hocket.Task):
    """Its loss is in the method of a Task."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(make_model(), nn.Softmax(1))

    def forward(self, batch: Any) -> Any:
        return self.layers(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize(
    ("squash", "loss", "said"),
    [
        (nn.Softmax(1), lambda o, t: F.cross_entropy(o.view(-1, 3), t), "cross_entropy takes logits.*a softmax"),
        (nn.Softmax(1), lambda o, t: -o.log_softmax(1)[:, 0].mean(), "log_softmax takes logits.*Remove the softmax"),
        (nn.Sigmoid(), nn.CrossEntropyLoss(), "cross_entropy takes logits.*Remove the sigmoid"),
        (
            nn.Sigmoid(),
            lambda o, t: F.binary_cross_entropy_with_logits(o, o.detach()),
            "loss=torch.*binary_cross_entropy",
        ),
    ],
)
def test_probabilities_in_any_loss_of_logits_are_said(squash: nn.Module, loss: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        make_trainer(model=nn.Sequential(make_model(), squash), loss=loss).fit()


def test_probabilities_in_the_loss_of_a_task_are_said() -> None:
    with pytest.warns(UserWarning, match="Remove the softmax"):
        make_trainer(model=Written(), loss=None).fit()


def test_losses_of_the_right_scale_are_left_alone() -> None:
    losses: list[Any] = [
        F.cross_entropy,
        lambda o, t: F.nll_loss(o.log_softmax(1), t),
        lambda o, t: F.binary_cross_entropy(o.sigmoid(), o.detach().sigmoid()),
        lambda o, t: F.kl_div(o.log_softmax(1), o.detach().softmax(1), reduction="batchmean"),
        lambda o, t: F.nll_loss(o.softmax(1).log(), t),
    ]
    for loss in losses:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make_trainer(loss=loss).fit()


class Recomputed(nn.Module):
    """Its graph has no edge to a parameter, though they get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(self.inner, inputs.clone().requires_grad_(), use_reentrant=True)


def test_a_loss_that_trains_is_not_refused() -> None:
    """A custom function, and frozen parts."""
    frozen = nn.Sequential(make_model().requires_grad_(False), nn.Linear(3, 3))
    for model in (Recomputed(), frozen):
        before = copy.deepcopy(model.state_dict())
        make_trainer(model=model).fit()
        assert not same(model.state_dict(), before)


def test_a_single_sample_in_the_place_of_a_batch_is_said() -> None:
    with pytest.warns(UserWarning, match=r"shape \(8,\) and one number.*batch_size=32"):
        make_trainer(train_data=DataLoader([(torch.randn(8), torch.tensor(1))], batch_size=None)).fit()


def test_unused_items_are_said_in_an_evaluation_before_training() -> None:
    trainer = make_trainer()
    data = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long), torch.zeros(4))]
    with pytest.warns(UserWarning, match=r"nothing uses batch\[2\]"):
        trainer.evaluate(data)
    assert "loss" not in vars(trainer.state.task)


@pytest.mark.parametrize(
    ("message", "targets", "write"),
    [
        ("expected scalar type Long but found Float", torch.zeros(4), "targets.long()"),  # torch 2.9
        ("expected target dtype to be Long or Byte, but got Float", torch.zeros(4), "targets.long()"),  # torch 2.15
        ("0D or 1D target tensor expected, multi-target not supported", torch.zeros(4, 1), "targets.squeeze(1)"),
        ("Target 3 is out of bounds.", torch.full((4,), 3), "torch.nn.Linear(…, 4)"),
    ],
)
def test_messages_of_several_versions_of_torch(message: str, targets: torch.Tensor, write: str) -> None:
    error = RuntimeError(message)
    task = SupervisedTask(nn.Linear(2, 3), F.cross_entropy)
    failures.explain(error, "loss", task, (torch.zeros(4, 2), targets), torch.zeros(4, 3))
    assert write in error.__notes__[0] and str(error) == message


def test_an_error_in_backward_for_targets_of_another_dtype() -> None:
    """In torch 2.9 the mean squared error of integer targets fails there."""
    error = RuntimeError("Found dtype Long but expected Float")
    batch = torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.long)
    failures.explain(error, "backward", SupervisedTask(nn.Linear(2, 1), F.mse_loss), batch, torch.zeros(4, 1))
    assert "targets.float()" in error.__notes__[0]


def test_explaining_never_raises() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError

    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    failures.explain(error, "forward", SupervisedTask(nn.Linear(2, 1), None), Odd())
    failures.explain(error, "loss", None, None)  # type: ignore[arg-type]


def test_errors_of_a_model_keep_their_type_and_text() -> None:
    class Own(Exception):
        pass

    def loss(outputs: Any, targets: Any) -> Any:
        raise Own("of the user")

    with pytest.raises(Own) as caught:
        make_trainer(loss=loss).fit()
    assert str(caught.value) == "of the user" and "float32 of shape (32, 8)" in caught.value.__notes__[0]


def test_signatures_stay_those_of_the_source() -> None:
    assert list(inspect.signature(hocket.Trainer).parameters)[:3] == ["model", "train_data", "loss"]
    assert list(inspect.signature(hocket.Trainer.fit).parameters) == ["self", "train_data", "eval_data", "duration"]


def test_what_a_step_reads_has_no_getattr() -> None:
    """A class with ``__getattr__`` has slow attributes: Python does not specialize their access."""
    for kind in (hocket.State, hocket.Timestamp):
        assert not hasattr(kind, "__getattr__")


@pytest.mark.parametrize("make", [make_trainer, lambda: make_trainer().fit()])
def test_a_missing_attribute_is_an_attribute_error(make: Callable[[], Any]) -> None:
    made = make()
    assert not hasattr(made, "nothing") and getattr(made, "nothing", 3) == 3
    with pytest.raises(AttributeError, match="no 'nothing'; it has"):
        made.nothing  # noqa: B018


def test_a_result_is_still_copied_and_pickled() -> None:
    result = make_trainer(eval_data=make_data()).fit()
    assert copy.deepcopy(result) == pickle.loads(pickle.dumps(result)) == result
    assert (
        type(result.metrics) is Values and "val/loss" not in result.metrics and result.metrics.get("val/loss") is None
    )


@pytest.mark.parametrize("name", METRICS)
def test_metrics_by_name_are_those_of_torchmetrics(name: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(0)
    outputs, numbers = torch.randn(2, 50, 4, generator=generator).unbind()
    reference, targets = {
        "accuracy": (torchmetrics.classification.MulticlassAccuracy(4, average="micro"), numbers.argmax(1)),
        "mae": (torchmetrics.MeanAbsoluteError(), numbers),
        "mse": (torchmetrics.MeanSquaredError(), numbers),
    }[name]
    parts = [METRICS[name](), METRICS[name]()]
    for begin, end, part in ((0, 7, 0), (7, 20, 1), (20, 50, 1)):
        reference.update(outputs[begin:end], targets[begin:end])
        parts[part].update(outputs[begin:end], targets[begin:end])
    parts[0].merge_state([parts[1]])
    assert parts[0].compute() == pytest.approx(reference.compute().item(), abs=1e-6)


def test_the_accuracy_of_logits_and_of_one_hot_labels() -> None:
    metric = METRICS["accuracy"]()
    metric.update(torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([1, 0, 0]))
    assert metric.compute() == pytest.approx(2 / 3)
    metric.reset()
    metric.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[0, 1], [0, 1]]))
    assert metric.compute() == 0.5


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor, loss: Any) -> float:
    """The accuracy of outputs over batches of different sizes."""
    batches = [(outputs[i:j], targets[i:j]) for i, j in ((0, 7), (7, 20), (20, 50))]
    trainer = hocket.Trainer(model=nn.Identity(), loss=loss, device="cpu", metrics=["accuracy"])
    return trainer.evaluate({"test": batches})["test/accuracy"]


GENERATOR = torch.Generator().manual_seed(5)
LOGITS, SEVERAL = torch.randn(50, 4, generator=GENERATOR), torch.randint(2, (50, 4), generator=GENERATOR).float()


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy", nn.BCELoss(), "binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss()]
)
def test_the_loss_says_above_what_a_binary_output_is_positive(loss: Any, columns: int) -> None:
    outputs, targets = LOGITS[:, :columns], SEVERAL[:, :columns]
    right = ((outputs > 0) == (targets == 1)).float().mean().item()
    of_logits = isinstance(loss, nn.BCEWithLogitsLoss) or "logits" in str(loss)
    assert _accuracy(outputs if of_logits else outputs.sigmoid(), targets, loss) == pytest.approx(right)


def test_binary_outputs_that_may_be_probabilities_warn() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(outputs.sigmoid(), targets)

    with pytest.warns(UserWarning, match=r"all from 0 to 1.*BinaryAccuracy\(threshold=0.5\)"):
        _accuracy(LOGITS[:, :1].sigmoid(), SEVERAL[:, :1], loss)
    right = ((LOGITS[:, :1] > 0) == (SEVERAL[:, :1] == 1)).float().mean().item()
    assert _accuracy(LOGITS[:, :1], SEVERAL[:, :1], loss) == pytest.approx(right)


def test_several_labels_of_a_loss_that_says_nothing_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"shape \(7, 4\).*several labels.*MultilabelAccuracy\(4, average='micro'\)"):
        _accuracy(LOGITS, SEVERAL, lambda o, t: F.mse_loss(o, t))


def test_one_hot_labels_are_classes_whatever_the_loss() -> None:
    labels = SEVERAL.argmax(1)
    right = (LOGITS.argmax(1) == labels).float().mean().item()
    for loss in ("binary_cross_entropy_with_logits", "cross_entropy"):
        assert _accuracy(LOGITS, F.one_hot(labels, 4).float(), loss) == pytest.approx(right)


@pytest.mark.parametrize("ignored", [-100, 2, -1])
def test_the_accuracy_omits_ignored_labels(ignored: int) -> None:
    labels = SEVERAL.argmax(1)
    labels[::3] = ignored
    expected = (LOGITS.argmax(1) == labels)[labels != ignored].float().mean().item()
    loss = F.cross_entropy if ignored == -100 else nn.CrossEntropyLoss(ignore_index=ignored)
    assert _accuracy(LOGITS, labels, loss) == pytest.approx(expected)


def test_the_accuracy_of_labels_without_a_class_is_refused() -> None:
    labels = SEVERAL.argmax(1)
    labels[30] = -1
    with pytest.raises(ValueError, match=r"neither a class of the outputs nor -100.*ignore_index=…"):
        _accuracy(LOGITS, labels, lambda o, t: F.cross_entropy(o, t, ignore_index=-1))


def test_accuracies_of_ranks_are_merged() -> None:
    parts = []
    for some in (slice(0, 20), slice(20, 50)):
        metric = METRICS["accuracy"]()
        metric.follow(F.binary_cross_entropy_with_logits)  # type: ignore[attr-defined]
        targets = F.one_hot(SEVERAL[some].argmax(1), 4).float() if not parts else SEVERAL[some]
        metric.update(LOGITS[some], targets)
        parts.append((metric, ((LOGITS[some] > 0) == (targets == 1)).float()))
    parts[0][0].merge_state([parts[1][0]])
    assert parts[0][0].compute() == pytest.approx(torch.cat([right for _, right in parts]).mean().item())


def _warnings_of_a_fit(batch: Any, **changes: Any) -> list[str]:
    given = {
        "model": nn.Linear(4, 3),
        "loss": F.cross_entropy,
        "optimizer": "sgd(lr=0.1)",
        "duration": "2ep",
        **changes,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hocket.Trainer(train_data=[batch] * 2, device="cpu", **given).fit()
    return [str(each.message) for each in caught]


INPUTS, LABELS = LOGITS[:16], SEVERAL[:16, :3].argmax(1)


def test_an_accuracy_in_the_place_of_the_weight_warns_once() -> None:
    def loss(weight: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        return lambda o, t: (F.cross_entropy(o, t), weight(o))

    (said,) = _warnings_of_a_fit((INPUTS, LABELS), loss=loss(lambda o: torch.tensor(0.4375)))
    assert "the weight 0.4375 for 16 samples" in said and "metrics='accuracy'" in said
    assert len(_warnings_of_a_fit((INPUTS, LABELS), loss=loss(lambda o: 0.4375))) == 1
    for meant in (2.5, 0, 16, torch.tensor(16)):  # sums of sample weights, and counts
        assert not _warnings_of_a_fit((INPUTS, LABELS), loss=loss(lambda o, meant=meant: meant))
    assert not _warnings_of_a_fit((INPUTS[:1], LABELS[:1]), loss=loss(lambda o: 0.5)), "one sample's own weight"


def test_unused_items_of_a_batch_warn_once() -> None:
    batch = (INPUTS, LABELS, torch.ones(16))
    (said,) = _warnings_of_a_fit(batch)
    assert "nothing uses batch[2]:" in said and "targets=lambda batch: batch[1:]" in said
    assert "nothing uses batch[2], batch[3]:" in _warnings_of_a_fit([*batch, torch.ones(16)])[0]
    assert not _warnings_of_a_fit(batch, inputs=0, targets=1)
    weighted = {
        "targets": lambda batch: batch[1:],
        "loss": lambda o, rest: F.cross_entropy(o, rest[0]) * rest[1].mean(),
    }
    assert not _warnings_of_a_fit(batch, **weighted)


def test_metrics_without_an_evaluation_set_warn() -> None:
    (said,) = _warnings_of_a_fit((INPUTS, LABELS), metrics="accuracy")
    assert "Pass eval_data=; or write train_metrics=" in said
    assert not _warnings_of_a_fit((INPUTS, LABELS), metrics="accuracy", eval_data=[(INPUTS, LABELS)])
    assert not _warnings_of_a_fit((INPUTS, LABELS), train_metrics="accuracy")


def test_the_tables_of_names_lead_to_what_exists() -> None:
    for kind in (
        "precisions",
        "devices",
        "strategies",
        "optimizers",
        "schedules",
        "callbacks",
        "loggers",
        "algorithms",
    ):
        missing = set(names.table("plugins", kind)) - set(hocket.plugins.names(kind))
        assert not missing, (kind, missing)
    assert not set(names.table("hooks")) - hocket.hookspecs.HOOKS


@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers", "optimizers", "schedules"])
def test_every_argument_without_a_default_has_a_value_to_type(kind: str) -> None:
    for entry in hocket.plugins.entries(kind):
        parameters = [*inspect.signature(entry.load()).parameters.values()][kind == "optimizers" :]
        for each in parameters:
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                value = ast.literal_eval(names.example(entry.load(), each.name))
                assert value is not ... and signatures.fits(value, signatures.hints(entry.load()).get(each.name, Any))


def test_arguments_that_are_no_dict_are_shown_with_the_name_of_the_first() -> None:
    with pytest.raises(hocket.plugins.PluginConfigError, match=r"Write {'ema': {'half_life': '3ba'}}\."):
        make_trainer(algorithms=[{"ema": "3ba"}])
    with pytest.raises(hocket.plugins.PluginConfigError, match=r"Write {'early-stopping': {'monitor': 'loss'}}\."):
        make_trainer(callbacks=[{"early-stopping": "loss"}])


class Classifier(hocket.Task):
    """A Task that trains; subclasses add a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model()

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


def _ignored(self: Any, *args: Any) -> None:
    raise AssertionError("hocket never calls it")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("on_train_epoch_end", "epoch_end(self, state), here or in a hocket.Callback"),
        ("on_train_start", "fit_start(self, state), here or in a hocket.Callback"),
        ("on_fit_start", "fit_start(self, state), here or in a hocket.Callback"),
        ("epoch_started", "epoch_start(self, state), here or in a hocket.Callback"),
        ("eval_step", "metrics(self, split)"),
        ("training_step", "loss(self, outputs, batch)"),
        ("setup", "__init__"),
        ("train_dataloader", "train_data=loader"),
        ("trainbatch", "train_batch(self, batch, step)"),
        ("eval_foward", "eval_forward(self, batch)"),
        ("update_metrics", "update_metric(self, metric, outputs, batch)"),
        ("metric", "metrics(self, split)"),
        ("configure_optimizer", "configure_optimizers(self)"),
    ],
)
def test_methods_that_a_task_is_never_asked_for_are_said(name: str, write: str) -> None:
    task = type("Net", (type("Base", (Classifier,), {name: _ignored}),), {"encode": _ignored})()
    with pytest.warns(UserWarning, match=re.escape(f"Net defines {name}, which hocket never calls")) as caught:
        make_trainer(model=task, loss=None)
    assert [write in str(each.message) for each in caught] == [True]


def test_methods_that_are_never_called_are_said_in_one_warning() -> None:
    task = type("Net", (Classifier,), {"eval_step": _ignored, "trainbatch": _ignored})()
    with pytest.warns(UserWarning, match="Net defines eval_step, trainbatch, which") as caught:
        make_trainer(model=task, loss=None)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_helpers_of_a_task_are_not_said() -> None:
    class Other:
        def on_train_start(self) -> None: ...

    class Net(Classifier, Other):
        def __init__(self) -> None:
            super().__init__()
            self.setup()

        def setup(self) -> None: ...

        def encode(self, batch: Any) -> Any:
            return batch[0]

        def metric(self) -> Any:
            return METRICS["accuracy"]()

        def metrics(self, split: str) -> Any:
            return {name: self.metric() for name in ("accuracy",)}

        def train(self, mode: bool = True) -> Any:
            return super().train(mode)

        def _eval_step(self) -> None: ...

    make_trainer(model=Net(), loss=None)


@pytest.mark.parametrize("returned", [["accuracy"], {"accuracy": "accuracy"}, "accuracy"])
def test_metrics_of_a_task_take_the_forms_that_the_trainer_takes(returned: Any) -> None:
    class Net(Classifier):
        def metrics(self, split: str) -> Any:
            return returned

    values = []
    for task, given in ((Net(), None), (Classifier(), returned)):
        torch.manual_seed(1)
        task.layer = make_model()
        trainer = make_trainer(model=task, loss=None, eval_data=make_data(), metrics=given)
        trainer.fit()
        values.append(trainer.state.metrics["eval/accuracy"])
    assert values[0] == values[1]


SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)


class Counts(hocket.Task):
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.calls = nn.Linear(8, 3), 0

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.calls += 1
        return F.cross_entropy(outputs, batch[1])


def of_length(length: int) -> Any:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.randn(8), 1)] * 8)

        def __len__(self) -> int:
            return length

    return torch.utils.data.DataLoader(Stream(), 4)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("changes self.calls.*batch_end", {"model": Counts(), "loss": None, "microbatch": 16}),
        ("said that an epoch has 8 batches, and it ended after 2.*__len__", {"train_data": of_length(32)}),
        ("said that an epoch has 1 batches, and there are more.*__len__", {"train_data": of_length(4)}),
        ("BatchNorm1d computes its statistics over microbatches", {"model": normalized(), "microbatch": 16}),
        ("There are 2 EMA", {"algorithms": [{"ema": {"half_life": "1ba"}}, {"ema": {"half_life": "2ba"}}]}),
        ("accumulate='8ba' is more than the 3 batches", {"accumulate": "8ba"}),
        ("OneCycleLR has total_steps=90.*Write total_steps=6", {"schedule": lambda o: OneCycleLR(o, 0.1, 90)}),
        ("LambdaLR is stepped after each batch", {"schedule": lambda o: LambdaLR(o, lambda epoch: 0.9**epoch)}),
        ("smooths labels by label_smoothing=0.1", {"loss": SMOOTH, "algorithms": ["label-smoothing"]}),
        ("sanity_eval=", {"sanity_eval": 1}),
    ],
)  # fmt: skip
def test_what_may_not_be_meant_is_said(said: str, changes: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=said):
        make_trainer(**changes).fit()


def test_data_that_are_longer_than_they_say_are_said_once() -> None:
    class Longer:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter([(torch.ones(4, 8), torch.arange(4) % 3)] * 5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(train_data=Longer(), duration="3ep").fit()
    assert ["has 2 batches, and there are more" in str(each.message) for each in caught] == [True]


def test_a_duration_beside_train_data() -> None:
    data = [(torch.ones(4, 8), torch.arange(4) % 3)] * 3
    for duration in ("2ep", hocket.Time(2, hocket.basics.time.Unit.EPOCH)):
        trainer = make_trainer(train_data=None, duration=None)
        assert trainer.fit(duration, train_data=data).timestamp.batch == 6
        assert trainer.fit(duration, data, train_data=data).metrics["eval/loss"] > 0
    with pytest.raises(TypeError, match="two durations, '2ep' and duration='3ep'"):
        trainer.fit("2ep", duration="3ep")


def test_weights_beside_those_that_are_evaluated_are_said() -> None:
    trainer = make_trainer(algorithms=[{"ema": {"half_life": "1ba"}}])
    trainer.fit()
    with pytest.warns(UserWarning, match=r"training weights.*'ema'.*evaluated=True"):
        trainer.model_state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.model_state_dict(evaluated=False)
        make_trainer().model_state_dict()


class Killed(torch.utils.data.Dataset):
    """Kills the process that loads its last sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2), torch.zeros(1)


def test_a_killed_worker_is_explained_with_how_to_go_on():
    loader = torch.utils.data.DataLoader(Killed(), batch_size=4, num_workers=1)
    trainer = hocket.Trainer(nn.Linear(2, 1), loader, loss="mse_loss", optimizer="sgd(lr=0.1)", duration="1ep")
    with pytest.raises((RuntimeError, EOFError, ConnectionError)) as caught:
        trainer.fit()
    assert "resume=True continues the run" in "".join(caught.value.__notes__)
