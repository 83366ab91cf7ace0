"""The guard against loss spikes: its statistic, and runs with planted spikes against runs without them."""

from __future__ import annotations

import copy
import json
import math
import statistics
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_general import EMA, SAM, BatchSizeWarmup, LossSpikeGuard
from hocket_general.functional import spike_score
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_testkit.reference import labelled_images


def _mislabelled():
    """The reference data, with a batch of wrong labels."""
    data = labelled_images()
    data[2] = (data[2][0], (data[2][1] + 1) % 4)
    return data


@pytest.mark.filterwarnings("ignore:The loss spiked")
class TestRollback(AlgorithmConformance):
    """So sensitive that every rise of the loss is a spike."""

    exempt = {
        "test_trains": "it undoes most batches here",
        "test_works_with_microbatches": "rounding decides what is a spike here",
        "test_works_in_bf16": "rounding decides what is a spike here",
    }

    def make(self):
        return LossSpikeGuard(threshold=1e-4, window=1, warmup=1, every=3, limit=100)

    def data(self):
        return _mislabelled()


@pytest.mark.long  # what differs from rolling back has quick tests below
@pytest.mark.filterwarnings("ignore:The loss spiked")
class TestSkip(AlgorithmConformance):
    exempt = {
        "test_trains": "the loss of the batch of wrong labels rises",
        "test_works_with_microbatches": "rounding decides what is a spike here",
    }

    def make(self):
        return LossSpikeGuard("skip", threshold=1e-4, window=1, warmup=1, limit=100)

    def data(self):
        return _mislabelled()


# --- the statistic


def test_the_score():
    history = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 50.0]
    deviation = statistics.median(abs(each - 1.0) for each in history)
    assert spike_score(2.0, history) == pytest.approx(1.0 / (1.4826 * deviation))  # the outlier changes nothing
    assert spike_score(0.5, history) < 0
    assert spike_score(math.nan, history) == spike_score(math.inf, history) == math.inf
    assert spike_score(1.03, [1.0] * 5) == pytest.approx(3.0)  # a hundredth of the median at least
    assert spike_score(0.0, [0.0]) == 0.0 and spike_score(0.1, [0.0]) == math.inf
    with pytest.raises(ValueError, match="empty history"):
        spike_score(1.0, [])


def test_it_is_about_standard_deviations_for_normal_values():
    values = torch.randn(20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert spike_score(3.0, (values * 0.5 + 2).tolist()) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"action": "stop"}, "'rollback' or 'skip'"),
        ({"threshold": 0}, "positive number"),
        ({"warmup": 200}, "at most window"),
        ({"every": 0}, "numbers of batches"),
        ({"limit": -1}, "0 or more"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        LossSpikeGuard(**arguments)


# --- in training

_X = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
_Y = _X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 5


def _spiky(*batches, value=1000.0, size=4):
    """Return the data set with targets that make these batches spikes."""
    targets = _Y.clone()
    for batch in batches:
        targets[batch * size : (batch + 1) * size] = value
    return TensorDataset(_X, targets)


def _guard(**arguments):
    return LossSpikeGuard(**{"warmup": 5, "window": 20, "threshold": 20.0, "every": 10, **arguments})


def _trainer(tmp_path, guard, data, **arguments):
    return hocket.Trainer(**{
        "model": nn.Linear(4, 1), "loss": "mse_loss", "optimizer": "adamw(lr=0.01)", "device": "cpu", "seed": 3,
        "train_data": data if isinstance(data, DataLoader | list) else DataLoader(data, 4), "duration": "1ep",
        "folder": tmp_path, "run_name": "run", "algorithms": [] if guard is None else [guard], **arguments,
    })  # fmt: skip


def _seeded_linear():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 1)


def _fit(tmp_path, guard, data, **arguments):
    trainer = _trainer(tmp_path, guard, data, **{"model": _seeded_linear(), **arguments})
    trainer.fit()
    return trainer


def _journal(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "loss_spikes.jsonl").read_text().splitlines()]


def _same(one, other):
    first, second = one.model_state_dict(evaluated=False), other.model_state_dict(evaluated=False)
    return all(value.equal(second[name]) for name, value in first.items())


@pytest.mark.parametrize("algorithm", [None, SAM])
def test_a_skipped_batch_changes_nothing(tmp_path, algorithm):
    others = [] if algorithm is None else [algorithm()]
    guard = _guard(action="skip")
    with pytest.warns(RuntimeWarning, match=r"spiked in batch 15 .* its step is skipped"):
        trainer = _fit(tmp_path / "a", guard, _spiky(15), algorithms=[guard, *others])
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number != 15]
    expected = _fit(tmp_path / "b", None, batches, algorithms=[algorithm() for _ in others])
    assert _same(trainer, expected)
    (entry,) = _journal(tmp_path / "a")
    assert (entry["batch"], entry["epoch"], entry["batch_in_epoch"]) == (15, 0, 15)
    assert entry["samples"] == [60, 61, 62, 63]
    assert entry["values"]["loss"] > 1e5 and entry["scores"]["loss"] > 20 and entry["action"] == "skip"


def test_a_rollback_undoes_the_spike_and_what_followed(tmp_path):
    """Batches 10 to 17 are undone: the copy is from after batch 9, the spike in 16, and it is noticed after 17."""
    guard = _guard(skip=2)
    with pytest.warns(RuntimeWarning, match=r"spiked in batch 16 .* the state after batch 10 is restored"):
        trainer = _fit(tmp_path / "a", guard, _spiky(16), schedule=None)
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if not 10 <= number < 20]
    assert _same(trainer, _fit(tmp_path / "b", None, batches))
    assert trainer.state.timestamp.batch == 40
    (entry,) = _journal(tmp_path / "a")
    assert entry["restored"] == 10 and entry["samples"] == [64, 65, 66, 67]


@pytest.mark.parametrize("at", [18, 19, 38, 39])
def test_a_spike_just_before_a_copy_or_the_end(tmp_path, at):
    guard = _guard()
    with pytest.warns(RuntimeWarning, match=f"spiked in batch {at} "):
        trainer = _fit(tmp_path / "a", guard, _spiky(at))
    undone = range(at // 10 * 10, at + 1 if at in (19, 39) else at + 2)
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number not in undone]
    assert _same(trainer, _fit(tmp_path / "b", None, batches))


def test_algorithms_and_buffers_roll_back_too(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    guard = _guard()
    with pytest.warns(RuntimeWarning, match="restored"):
        trainer = _fit(tmp_path / "a", guard, _spiky(16), model=model(), algorithms=[guard, EMA(smoothing=0.8)])
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if not 10 <= number < 18]
    expected = _fit(tmp_path / "b", None, batches, model=model(), algorithms=[EMA(smoothing=0.8)])
    assert _same(trainer, expected)
    first, second = trainer.model_state_dict(evaluated=True), expected.model_state_dict(evaluated=True)
    assert all(value.equal(second[name]) for name, value in first.items())


@pytest.mark.filterwarnings("ignore:The loss spiked")
@pytest.mark.parametrize("at", [19, 39])
def test_evaluations_and_checkpoints_have_no_spiked_weights(tmp_path, at):
    """The last batch before them is judged in time: they have the weights of a run without the undone batches."""
    evaluated, spiked, seen = list(DataLoader(_spiky(), 40)), at + 1, {}

    class Watch(hocket.Callback):
        def eval_end(self, state):
            seen[state.timestamp.batch] = state.metrics["eval/loss"]

    trainer = _trainer(
        tmp_path, _guard(), _spiky(at), model=_seeded_linear(), eval_data=evaluated, eval_every="20ba",
        callbacks=[Watch()], checkpoints=hocket.Checkpoints(tmp_path / "checkpoints", every="20ba", keep=None),
    )  # fmt: skip
    result = trainer.fit()
    assert len(_journal(tmp_path)) == 1
    assert result.metrics["eval/loss"] == trainer.evaluate()["eval/loss"]
    plain = _fit(tmp_path / "plain", None, list(DataLoader(_spiky(), 4))[: spiked - 10])
    with torch.no_grad():
        expected = sum(nn.functional.mse_loss(plain.state.model(x), y).item() for x, y in evaluated) / len(evaluated)
    assert seen[spiked] == pytest.approx(expected, rel=1e-5)
    saved = hocket.checkpoints.read_weights(tmp_path / "checkpoints" / result.checkpoints[spiked // 20 - 1])
    assert all(saved[name].equal(value) for name, value in plain.model_state_dict().items())


@pytest.mark.filterwarnings("ignore:The loss spiked")
@pytest.mark.parametrize("every", ["7ba", "0.175dur"])
def test_a_checkpoint_that_is_due_without_an_evaluation(tmp_path, every):
    """Batch 20 is the last before the checkpoint, and the copy is from just before it."""
    trainer = _trainer(
        tmp_path, _guard(), _spiky(20), model=_seeded_linear(),
        checkpoints=hocket.Checkpoints(tmp_path / "checkpoints", every=every, keep=None),
    )  # fmt: skip
    trainer.fit()
    plain = _fit(tmp_path / "plain", None, list(DataLoader(_spiky(), 4))[:20])
    saved = hocket.checkpoints.read_weights(tmp_path / "checkpoints" / "ep0-ba21")
    assert all(saved[name].equal(value) for name, value in plain.model_state_dict(evaluated=False).items())
    assert [entry["restored"] for entry in _journal(tmp_path)] == [20]


@pytest.mark.filterwarnings("ignore:The loss spiked")
def test_averages_are_as_old_as_the_training_that_counts(tmp_path):
    """The time of the batches that are undone is not that of an average: the next update moves it as any other."""
    guard, ema = _guard(), EMA(half_life="20ba")
    trainer = _fit(tmp_path / "a", guard, _spiky(16), algorithms=[ema, guard])
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if not 10 <= number < 18]
    expected = _fit(tmp_path / "b", None, batches, algorithms=[EMA(half_life="20ba")])
    first, second = trainer.model_state_dict(evaluated=True), expected.model_state_dict(evaluated=True)
    assert all(value.equal(second[name]) for name, value in first.items())


def test_a_callback_that_takes_the_steps_hides_no_spike(tmp_path):
    class Steps(hocket.Callback):
        def optimizer_step(self, state, closure):
            return state.bus.step_optimizer(state.step_optimizers[0], closure)

    with pytest.warns(RuntimeWarning, match="spiked in batch 16 "):
        trainer = _fit(tmp_path / "a", _guard(), _spiky(16), callbacks=[Steps()])
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if not 10 <= number < 18]
    assert _same(trainer, _fit(tmp_path / "b", None, batches))


def test_an_evaluation_as_a_batch_starts_leaves_the_batch_to_be_judged(tmp_path):
    class Evaluates(hocket.Callback):
        def before_train_batch(self, state):
            if state.timestamp.batch == 16:
                trainer.evaluate(list(DataLoader(_spiky(), 40)))

    trainer = _trainer(tmp_path, _guard(), _spiky(16), callbacks=[Evaluates()])
    with pytest.warns(RuntimeWarning, match="spiked in batch 16 "):
        trainer.fit()


def test_schedules_of_steps_go_back_and_schedules_of_time_go_on(tmp_path):
    for name, schedule, steps in (
        ("torch", lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), 32),
        ("time", "linear", 40),
    ):
        guard = _guard()
        with pytest.warns(RuntimeWarning, match="restored"):
            trainer = _fit(tmp_path / name, guard, _spiky(16), schedule=schedule)
        expected = 0.01 / (1 + steps) if name == "torch" else 0.0
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Not finite in")
def test_a_non_finite_loss(tmp_path):
    guard = _guard()
    with pytest.warns(RuntimeWarning, match="batch 16 .*: loss nan; "):
        trainer = _fit(tmp_path, guard, _spiky(16, value=math.nan), nonfinite="warn")
    assert all(value.isfinite().all() for value in trainer.model_state_dict().values())
    assert _journal(tmp_path)[0]["values"]["loss"] == "nan"


@pytest.mark.filterwarnings("ignore:Not finite in", "ignore:The loss spiked")
@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_non_finite_losses_are_first_the_trainers(tmp_path, action):
    """The Trainer raises, skips the step, which is then no spike, or leaves it to the guard."""
    data = _spiky(16, value=math.nan)

    def fit(nonfinite):
        return _fit(tmp_path / nonfinite, _guard(action=action), data, nonfinite=nonfinite)

    with pytest.raises(FloatingPointError, match="batch 16"):
        fit("raise")
    without = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number != 16]
    assert _same(fit("skip"), _fit(tmp_path / "plain", None, without))
    assert not any((tmp_path / each / "run" / "loss_spikes.jsonl").exists() for each in ("raise", "skip"))
    undone = range(10, 18) if action == "rollback" else [16]
    without = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number not in undone]
    assert _same(fit("warn"), _fit(tmp_path / "plain again", None, without))
    assert [entry["batch"] for entry in _journal(tmp_path / "warn")] == [16]


@pytest.mark.parametrize(("action", "undone"), [("rollback", range(10, 20)), ("skip", [17])])
@pytest.mark.parametrize("algorithm", [None, SAM])
def test_a_spike_in_the_second_part_of_a_batch(tmp_path, action, undone, algorithm):
    """Batches of eight, in two steps each: a loop over batches of four."""
    guard = _guard(action=action, every=5)
    others = [] if algorithm is None else [algorithm()]
    parts = BatchSizeWarmup(0.5, "1000ep")
    with pytest.warns(RuntimeWarning, match="spiked in batch 8 "):
        trainer = _fit(tmp_path / "a", guard, DataLoader(_spiky(17), 8), algorithms=[parts, guard, *others])
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number not in undone]
    assert _same(trainer, _fit(tmp_path / "b", None, batches, algorithms=[algorithm() for _ in others]))
    assert len(_journal(tmp_path / "a")) == 1


@pytest.mark.filterwarnings("ignore:Not finite in")
def test_a_part_whose_step_the_trainer_skips(tmp_path):
    """The part after it is judged as any other."""
    data = _spiky(17)
    data.tensors[1][64:68] = math.nan
    guard = _guard(action="skip")
    with pytest.warns(RuntimeWarning, match="spiked in batch 8 "):
        trainer = _fit(
            tmp_path / "a",
            guard,
            DataLoader(data, 8),
            algorithms=[BatchSizeWarmup(0.5, "1000ep"), guard],
            nonfinite="skip",
        )
    batches = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if number not in (16, 17)]
    assert _same(trainer, _fit(tmp_path / "b", None, batches))


def test_a_fit_rolls_back_into_itself(tmp_path):
    """A second fit starts from weights that were changed after the first one, and keeps no copy after its end."""
    guard, zeros = _guard(every=100), [torch.zeros(1, 4), torch.zeros(1)]
    trainer = _fit(tmp_path, guard, _spiky(16), duration="10ba", optimizer="sgd(lr=0.01)")
    assert guard.state_dict()["copy"] is None
    with torch.no_grad():
        for parameter, value in zip(trainer.state.model.parameters(), zeros, strict=True):
            parameter.copy_(value)
    with pytest.warns(RuntimeWarning, match=r"spiked in batch 16 .* the state after batch 10 is restored"):
        trainer.fit("8ba")
    assert all(map(torch.equal, trainer.state.model.parameters(), zeros))


@pytest.mark.filterwarnings("ignore:The loss spiked", "ignore:This run is configured differently")
def test_a_copy_with_the_state_of_an_algorithm_that_is_gone(tmp_path):
    keep = _Keep(12)
    guard = _guard()
    whole = _fit(tmp_path / "a", guard, _spiky(16), algorithms=[guard, EMA(smoothing=0.8)], callbacks=[keep])
    resumed = _trainer(tmp_path / "b", _guard(), _spiky(16), model=_seeded_linear())
    resumed.load_state_dict(keep.states[12], ignore=["plugins.algorithms.ema"])
    resumed.fit()
    assert _same(resumed, whole) and len(_journal(tmp_path / "b")) == 1


def test_the_norm_of_gradients(tmp_path):
    """A batch with a small loss and a large gradient."""

    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, slope):
            ctx.slope = slope
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.slope, None

    def loss(outputs, targets):
        return Steep.apply(nn.functional.mse_loss(outputs, targets[:, :1]), targets[0, 1].item())

    slopes = torch.ones(160, 1)
    slopes[64:68] = 1e6
    data = TensorDataset(_X, torch.cat([_Y, slopes], 1))
    quiet = _fit(tmp_path / "a", _guard(), data, loss=loss)
    assert not (tmp_path / "a" / "run" / "loss_spikes.jsonl").exists()
    guard = _guard(gradient_norm=True)
    with pytest.warns(RuntimeWarning, match="gradient_norm"):
        trainer = _fit(tmp_path / "b", guard, data, loss=loss)
    assert not _same(quiet, trainer)
    assert list(_journal(tmp_path / "b")[0]["scores"]) == ["gradient_norm"]


def test_the_limit(tmp_path):
    guard = _guard(limit=1)
    with (
        pytest.warns(RuntimeWarning, match="batch 15"),
        pytest.raises(RuntimeError, match=r"batch 25 .* spike 2 of this run, .* limit=1"),
    ):
        _fit(tmp_path, guard, _spiky(15, 25, 35))
    assert len(_journal(tmp_path)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_shuffled_and_accumulated_batches(tmp_path, workers):
    """The journal lists the samples of the batch."""
    data, seen = _spiky(7), []

    class Watch(hocket.Callback):
        def batch_start(self, state):
            seen.append(torch.cat([x for x, _ in state.batch.batches]))

    loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
    guard = _guard(action="skip", warmup=3, limit=100, threshold=50.0)
    with pytest.warns(RuntimeWarning, match="skipped"):
        _fit(tmp_path, guard, loader, accumulate="2ba", callbacks=[Watch()], duration="2ep")
    entries = _journal(tmp_path)
    assert entries and any(entry["epoch"] == 1 for entry in entries)
    for entry in entries:
        assert _X[entry["samples"]].equal(seen[entry["batch"]])
        assert set(range(28, 32)) & set(entry["samples"])


def test_data_without_indices(tmp_path):
    with pytest.warns(RuntimeWarning, match="skipped"):
        _fit(tmp_path, _guard(action="skip"), list(DataLoader(_spiky(15), 4)))
    assert _journal(tmp_path)[0]["samples"] is None and _journal(tmp_path)[0]["batch_in_epoch"] == 15


class _Keep(hocket.Callback):
    """Keep copies of the run's state after these batches."""

    def __init__(self, *batches):
        self.batches, self.states = batches, {}

    def batch_checkpoint(self, state):
        if state.timestamp.batch in self.batches:
            self.states[state.timestamp.batch] = copy.deepcopy(state.content.state_dict())


@pytest.mark.filterwarnings("ignore:The loss spiked")
@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_resume_around_a_spike_is_bitwise(tmp_path, action):
    def make(folder, **arguments):
        guard = _guard(action=action, skip=3)
        return _trainer(folder, guard, _spiky(16, 30), model=_seeded_linear(), **arguments)

    keep = _Keep(12, 16, 17, 18, 20)
    whole = make(tmp_path / "whole", callbacks=[keep])
    whole.fit()
    assert len(_journal(tmp_path / "whole")) == 2 and len(keep.states) == 5
    for batch, state in keep.states.items():
        resumed = make(tmp_path / f"after-{batch}")
        resumed.load_state_dict(state)
        resumed.fit()
        assert _same(resumed, whole), batch
        assert _journal(tmp_path / f"after-{batch}") == _journal(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_decide_together(tmp_path, strategy):
    """Only one rank's samples are outliers."""
    pytest.importorskip("hocket_strategies")
    data = _spiky(17, size=2)  # half of global batch 8

    def train(rank):
        guard = _guard(every=5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The loss spiked")
            trainer = _fit(tmp_path, guard, DataLoader(data, 2), strategy=strategy)
        return trainer.model_state_dict(), guard.state_dict()["journal"], trainer.state.timestamp.batch

    (first, journal, batches), (second, other, _) = run_ranks(train, 2)
    assert all(value.equal(second[name]) for name, value in first.items())
    assert journal == other and len(journal) == 1 and batches == 40
    assert sorted(journal[0]["samples"]) == [32, 33, 34, 35] and journal[0]["batch"] == 8
    kept = [batch for number, batch in enumerate(DataLoader(_spiky(), 4)) if not 5 <= number < 10]
    expected = _fit(tmp_path / "plain", None, kept).model_state_dict()
    for name, value in first.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_shards_of_a_copy_resume(tmp_path):
    """A run on two ranks that is resumed rolls back to the copy in its checkpoint."""
    pytest.importorskip("hocket_strategies")
    data = _spiky(17, size=2)

    def train(rank, folder, resume):
        keep = _Keep(7)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The loss spiked")
            loader = DataLoader(data, 2)
            trainer = _trainer(
                folder, _guard(every=5), loader, strategy="fsdp", model=_seeded_linear(), callbacks=[keep]
            )
            if resume is not None:
                trainer.load_state_dict(resume)
            trainer.fit()
        return trainer.model_state_dict(), keep.states.get(7)

    (whole, state), _ = run_ranks(train, 2, tmp_path / "a", None)
    for weights, _ in run_ranks(train, 2, tmp_path / "b", state):
        assert all(value.equal(whole[name]) for name, value in weights.items())
    assert _journal(tmp_path / "b")[0]["restored"] == 5
