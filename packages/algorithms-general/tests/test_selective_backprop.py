"""Selective backpropagation against its formula, plain PyTorch, and the traps of other implementations."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_general import SelectiveBackprop
from hocket_general.functional import select_using_loss, should_select
from hocket_testkit import AlgorithmConformance, no_sync, run_ranks


class TestSelectiveBackprop(AlgorithmConformance):
    def make(self):
        return SelectiveBackprop(start=None, stop=None, keep=0.5, interrupt=0)


def _inclusion(samples, keep):
    """The probability of each sample to be drawn, by adding up all orders of drawing without replacement."""
    weights = [((i + 0.5) / samples) ** (1 / keep - 1) for i in range(samples)]
    found = [0.0] * samples
    for order in itertools.permutations(range(samples), int(keep * samples)):
        probability, left = 1.0, sum(weights)
        for each in order:
            probability *= weights[each] / left
            left -= weights[each]
        for each in order:
            found[each] += probability
    return found


def test_inclusion_is_that_of_drawing_without_replacement():
    expected = _inclusion(8, 0.5)
    # What Composer was seen to do.
    assert expected == pytest.approx([0.09, 0.24, 0.38, 0.50, 0.60, 0.67, 0.74, 0.78], abs=0.01)  # measured, from draws
    generator, drawn = torch.Generator().manual_seed(0), 4000
    losses = torch.tensor([0.3, 0.1, 0.8, 0.2, 0.6, 0.5, 0.7, 0.4])
    counts = torch.zeros(8)
    for _ in range(drawn):
        counts[select_using_loss(losses, 0.5, generator=generator)] += 1
    assert (counts[losses.argsort()] / drawn).tolist() == pytest.approx(expected, abs=4 * (0.25 / drawn) ** 0.5)


@pytest.mark.parametrize(
    ("samples", "keep", "kept"), [(8, 0.5, 4), (7, 0.5, 3), (10, 0.7, 7), (100, 0.29, 29), (1, 0.1, 1)]
)
def test_the_number_of_samples(samples, keep, kept):
    chosen = select_using_loss(torch.rand(samples), keep)
    assert chosen.dtype == torch.int64 and len(chosen.unique()) == len(chosen) == kept
    assert chosen.equal(chosen.sort().values)


def test_small_weights_do_not_underflow_and_nan_is_the_smallest_loss():
    losses = torch.arange(5000.0)
    assert select_using_loss(losses, 0.001).min() > 4000  # p ** 999
    assert not torch.isin(
        torch.arange(10), select_using_loss(torch.cat([torch.full((10,), torch.nan), losses]), 0.01)
    ).any()


def test_when_it_selects():
    assert [should_select(e, 0) for e in (0.49, 0.5, 0.89, 0.9)] == [False, True, True, False]
    assert [should_select(0.6, batch, interrupt=3) for batch in range(6)] == [True, True, False, True, True, False]
    assert all(should_select(0.6, batch, interrupt=0) for batch in range(4))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 0.0}, "fraction of samples"),
        ({"keep": 1.5}, "fraction of samples"),
        ({"interrupt": 1}, "0 to select in every batch"),
        ({"scale_factor": 0.0}, "fraction such as 0.5"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        SelectiveBackprop(**arguments)
    with pytest.raises(ValueError, match="of shape"):
        select_using_loss(torch.rand(2, 2))


# --- in training


class _Seen(hocket.Callback):
    """Record the batches that are trained on."""

    def __init__(self):
        self.batches = []

    def batch_start(self, state):
        self.batches.append(state.batch)


def _fit(model, data, algorithm=None, loss="cross_entropy", duration="2ep", **arguments):
    seen = _Seen()
    arguments.setdefault("algorithms", [algorithm or SelectiveBackprop(None, None, interrupt=0)])
    trainer = hocket.Trainer(
        model=model, loss=loss, train_data=data, optimizer="sgd(lr=0.1)", duration=duration, device="cpu", seed=1,
        callbacks=[seen], run_name="run", **arguments,
    )  # fmt: skip
    trainer.fit()
    return trainer, seen.batches


def _data(batches=8, samples=8):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(batches)
    ]


def test_the_window_and_the_interruptions(tmp_path):
    _, batches = _fit(
        nn.Linear(4, 3), _data(), SelectiveBackprop("0.25dur", "0.75dur", interrupt=4), duration="1ep", folder=tmp_path
    )
    assert [len(targets) for _, targets in batches] == [8, 8, 4, 8, 4, 4, 8, 8]


def test_fractions_advance_by_batch_in_a_run_of_one_epoch(tmp_path):
    """Elsewhere a duration in epochs makes the elapsed fraction a step function, which is 0 for the whole of one epoch."""
    _, batches = _fit(nn.Linear(4, 3), _data(), SelectiveBackprop(interrupt=0), duration="1ep", folder=tmp_path)
    assert [len(targets) for _, targets in batches] == [8, 8, 8, 8, 4, 4, 4, 4]


def test_selected_are_samples_of_the_batch_with_their_own_targets(tmp_path):
    data = [({"image": x, "name": [f"{i}" for i in range(8)]}, y) for x, y in _data()]
    _, batches = _fit(nn.Linear(4, 3), data, inputs=lambda batch: batch[0]["image"], duration="1ep", folder=tmp_path)
    for (before, targets), (after, kept) in zip(data, batches, strict=True):
        indices = [int(name) for name in after["name"]]
        assert len(indices) == 4
        assert after["image"].equal(before["image"][indices]) and kept.equal(targets[indices])


@pytest.mark.filterwarnings("ignore:.* has no effect")
@pytest.mark.parametrize("start", [None, "100ba"])
def test_scoring_moves_nothing(tmp_path, start):
    """Batch-norm statistics, dropout's random numbers and gradients are those of training on the selected samples alone."""

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    select = SelectiveBackprop(start, None, interrupt=0)
    selecting, batches = _fit(model(), _data(), select, duration="1ep", folder=tmp_path)
    assert len(batches[0][1]) == (8 if start else 4)
    plain, _ = _fit(model(), batches, duration="1ep", algorithms=[], folder=tmp_path / "plain")
    for name, value in plain.model_state_dict().items():
        assert value.equal(selecting.model_state_dict()[name]), name
    assert all(module.training for module in selecting.state.model.modules())


class _Shift(hocket.Algorithm):
    """An augmentation, which marks what it has seen."""

    events = {hocket.Event.AFTER_DATALOADER}
    phase = hocket.Phase.DATA

    def __init__(self):
        self.sizes = []

    def apply(self, event, state):
        self.sizes.append(len(state.batch[1]))
        state.batch = (state.batch[0] + 100, state.batch[1])


@pytest.mark.parametrize("first", [True, False])
def test_it_acts_before_augmentation(tmp_path, first):
    """In Composer the pass that reverses the order on after_ events undoes the pass that puts selection first."""
    shift, scored = _Shift(), []

    class Model(nn.Linear):
        def forward(self, inputs):
            if not torch.is_grad_enabled():
                scored.append(inputs)
            return super().forward(inputs)

    select = SelectiveBackprop(None, None, interrupt=0)
    algorithms = [select, shift] if first else [shift, select]
    trainer, _ = _fit(Model(4, 3), _data(), duration="1ep", algorithms=algorithms, folder=tmp_path)
    assert shift.sizes == [4] * 8
    assert all(inputs.max() < 50 and len(inputs) == 8 for inputs in scored) and len(scored) == 8
    assert "selective-backprop" in trainer.plan().events["after_dataloader"][0]


@pytest.mark.filterwarnings("ignore:Sequential is in eval mode")
def test_microbatches_of_the_scoring_pass_change_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()
    model[0].train()  # not batch norm, so that microbatches train alike
    _, full = _fit(copy.deepcopy(model), _data(), duration="1ba", folder=tmp_path)
    _, split = _fit(copy.deepcopy(model), _data(), duration="1ba", microbatch=3, folder=tmp_path / "split")
    assert all(a.equal(b) for x, y in zip(full, split, strict=True) for a, b in zip(x, y, strict=True))


# --- losses of each sample

_LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
_INDICES = torch.tensor([0, 1, 2, 0, 1, 2])
_IMAGES = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(1))
_MAPS = torch.tensor([[[0, 1], [2, -100]], [[-100, -100], [1, 1]], *([[[0, 1], [2, 1]]] * 4)])


def _mean_of_squares(outputs, targets):
    return (outputs - F.one_hot(targets, 3)).square().mean()


def _named(outputs, targets):
    return {"a": F.cross_entropy(outputs, targets), "b": 0.5 * outputs.square().mean()}


def _weighted(outputs, targets):
    return F.cross_entropy(outputs, targets), len(targets)


def _only_mean(outputs, targets, reduction="mean"):
    if reduction != "mean":
        raise ValueError("mean only")
    return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (F.cross_entropy, _LOGITS, _INDICES),
        (F.cross_entropy, _LOGITS, _LOGITS.softmax(1)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), _LOGITS, _INDICES),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), _LOGITS, _INDICES),
        (F.cross_entropy, _IMAGES, _MAPS),
        (functools.partial(F.cross_entropy, label_smoothing=0.0), _IMAGES, _MAPS),
        (nn.CrossEntropyLoss(ignore_index=1), _IMAGES, _MAPS.clamp(min=0)),
        (F.mse_loss, _IMAGES, _IMAGES.flip(0)),
        (_mean_of_squares, _LOGITS, _INDICES),
        (_named, _LOGITS, _INDICES),
        (_weighted, _LOGITS, _INDICES),
        (_only_mean, _LOGITS, _INDICES),
    ],
)
def test_the_loss_of_each_sample_is_that_of_a_batch_of_one(loss, outputs, targets):
    from hocket.basics.losses import as_loss
    from hocket.state.task import SupervisedTask
    from hocket_general.selective_backprop import _per_sample

    task = SupervisedTask(nn.Identity(), loss)
    expected = [as_loss(loss(outputs[i : i + 1], targets[i : i + 1])).value for i in range(6)]
    found = _per_sample(task, outputs, (outputs, targets), 6)
    torch.testing.assert_close(found, torch.stack(expected))
    assert getattr(loss, "reduction", "mean") == "mean"  # the user's loss is unchanged


class _Own(hocket.Task):
    """Ragged samples, divided by the task's own split."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, batch):
        return [self.head(sample).mean(0) for sample, _ in batch]

    def loss(self, outputs, batch):
        return F.cross_entropy(torch.stack(outputs), torch.tensor([target for _, target in batch]))

    def count(self, batch):
        return len(batch)

    def split(self, batch, size):
        return [batch[i : i + size] for i in range(0, len(batch), size)]

    def join(self, parts):
        return [sample for part in parts for sample in part]


def test_ragged_batches_of_a_task_with_its_own_split(tmp_path):
    data = [[(torch.randn(1 + i % 3, 4), i % 3) for i in range(8)] for _ in range(4)]
    _, batches = _fit(_Own(), data, loss=None, duration="1ep", folder=tmp_path)
    assert [len(batch) for batch in batches] == [4] * 4
    assert all(any(sample is kept for sample, _ in data[0]) for kept, _ in batches[0])


class _OwnLoss(nn.Linear):
    def forward(self, inputs, labels):
        logits = super().forward(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class _Pairs(hocket.Task):
    def __init__(self):
        super().__init__()
        self.head = _OwnLoss(4, 3)

    def forward(self, batch):
        return self.head(*batch)

    def loss(self, outputs, batch):
        return outputs["loss"]


@pytest.mark.parametrize(
    ("model", "data"),
    [(_OwnLoss(4, 3), [{"inputs": x, "labels": y} for x, y in _data()]), (_Pairs(), _data())],
)
def test_a_loss_over_the_whole_batch_is_refused(tmp_path, model, data):
    with pytest.raises(ValueError, match="over the whole batch"):
        _fit(model, data, loss=None, folder=tmp_path)


def test_smaller_images_for_scoring_only(tmp_path):
    sizes = []

    class Model(nn.Sequential):
        def forward(self, inputs):
            sizes.append((torch.is_grad_enabled(), tuple(inputs.shape), inputs.dtype))
            return super().forward(inputs.float())

    data = [(torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8), torch.randint(3, (8,))) for _ in range(2)]
    model = Model(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    _, batches = _fit(
        model, data, SelectiveBackprop(None, None, interrupt=0, scale_factor=0.5), duration="1ep", folder=tmp_path
    )
    assert sizes == [(False, (8, 3, 4, 4), torch.uint8), (True, (4, 3, 8, 8), torch.uint8)] * 2
    assert batches[0][0].shape == (4, 3, 8, 8)
    with pytest.raises(TypeError, match="scale_factor=1"):
        _fit(nn.Linear(4, 3), _data(), SelectiveBackprop(None, None, 0.5, 0, 0.5), folder=tmp_path / "vectors")


def test_nothing_waits_for_the_device(tmp_path):
    select = SelectiveBackprop(None, None, interrupt=0)
    free = select.apply

    def watched(event, state):
        with no_sync(simulate=True):
            free(event, state)

    select.apply = watched
    _, batches = _fit(nn.Linear(4, 3), _data(), select, duration="1ep", folder=tmp_path)
    assert [len(targets) for _, targets in batches] == [4] * 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_select_from_their_own_samples(tmp_path, strategy):
    pytest.importorskip("hocket_strategies")
    dataset = TensorDataset(*(torch.cat(each)[:60] for each in zip(*_data(), strict=True)))

    def train(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        trainer, batches = _fit(
            model, DataLoader(dataset, 8), strategy=strategy, duration="4ba", microbatch=3, folder=tmp_path
        )
        return trainer.model_state_dict(), [len(targets) for _, targets in batches], batches[0][0]

    (first, sizes, mine), (second, others, theirs) = run_ranks(train, 2)
    assert sizes == [4, 4, 4, 3] and others == [4, 4, 4, 3] and not mine.equal(theirs)
    assert all(first[name].equal(second[name]) for name in first)
