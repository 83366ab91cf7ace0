"""Core's callbacks say what is the case: figures against plain torch, the system and a clock set by the test."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import callback_config, installed_callbacks, make_data, make_model, make_trainer, momentum, same, weights
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data.batches import Counts
from hocket.loggers.memory import MemoryLogger
from hocket.state.task import SupervisedTask
from hocket_insight.callbacks.early_stopping import EarlyStopping
from hocket_insight.callbacks.nan_monitor import NaNMonitor
from hocket_insight.callbacks.optimizer_monitor import OptimizerMonitor


def batches(sizes: tuple[int, ...] = (4, 4, 2)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 5, generator=generator), torch.randn(size, 2, generator=generator)) for size in sizes]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def make(**changes: Any) -> hocket.Trainer:
    arguments = {
        "model": network(),
        "loss": F.mse_loss,
        "train_data": batches(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "log_every": "1ba",
        "device": "cpu",
    }
    return make_trainer(**{**arguments, **changes})


def logged(trainer: hocket.Trainer, logger: MemoryLogger) -> dict[str, list[float]]:
    trainer.fit()
    return {name: [value for _, value in values] for name, values in logger.metrics.items()}


class Clock(hocket.Callback):
    """The time that the loop and the callbacks see: every batch takes half a second, every batch of an evaluation eight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("hocket.loop.fit.time", clock)
        monkeypatch.setattr("hocket_insight.callbacks.runtime_estimator.time", clock)

    def before_forward(self, state: hocket.State) -> None:
        self.now += 0.5

    def eval_before_forward(self, state: hocket.State) -> None:
        self.now += 8.0


# --- speed


def test_speed_is_samples_over_seconds_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 4, 4 and 2 at half a second each; evaluation takes long and does not count."""
    monitor, logger = (
        {"speed-monitor": {"every": "2ba", "flops_per_sample": 30.0, "peak_flops": 1000.0}},
        MemoryLogger(),
    )
    trainer = make(callbacks=[Clock(monkeypatch), monitor], loggers=[logger], eval_data=batches(), eval_every="1ba")
    values = logged(trainer, logger)
    samples = [4 + 4, 2 + 4, 4 + 2]
    assert values["speed/samples_per_second"] == samples
    assert values["speed/batches_per_second"] == [2, 2, 2]
    assert values["speed/mfu"] == pytest.approx([30 * each / 1000 for each in samples])
    assert "speed/tokens_per_second" not in values


def test_tokens_and_operations_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sequences(SupervisedTask):
        def count(self, batch: Any) -> Counts:
            return Counts(len(batch[0]), 7 * len(batch[0]))

    monitor = {
        "speed-monitor": {"every": "3ba", "flops_per_sample": lambda batch: 10.0 * len(batch[0]), "peak_flops": 1e3}
    }
    logger = MemoryLogger()
    trainer = make(
        model=Sequences(network(), F.mse_loss), loss=None, callbacks=[Clock(monkeypatch), monitor], loggers=[logger]
    )
    values = logged(trainer, logger)
    assert values["speed/tokens_per_second"] == pytest.approx([70 / 1.5] * 2)
    assert values["speed/mfu"] == pytest.approx([(160 + 160 + 40) / 1.5 / 1e3] * 2)


def test_operations_are_those_of_the_batch_as_the_loader_made_it() -> None:
    """An algorithm that makes batches smaller on the same event does not change what they would have needed."""

    class Half(hocket.Algorithm):
        events, phase = {hocket.Event.AFTER_DATALOADER}, hocket.Phase.DATA

        def apply(self, event: hocket.Event, state: hocket.State) -> None:
            state.batch = tuple(tensor[:2] for tensor in state.batch)

    seen = []
    monitor = {
        "speed-monitor": {"flops_per_sample": lambda batch: seen.append(len(batch[0])) or 1.0, "peak_flops": 1.0}
    }
    make(callbacks=[monitor], algorithms=[Half()], duration="1ep").fit()
    assert seen == [len(batch[0]) for batch in batches()]


def test_an_unknown_peak_is_said_once() -> None:
    with pytest.warns(UserWarning, match="peak_flops=") as warned:
        make(callbacks=[{"speed-monitor": {"flops_per_sample": 1e6}}]).fit()
    assert len(warned) == 1
    with pytest.raises(TypeError, match="flops_per_sample='many', which is str"):
        make(callbacks=[{"speed-monitor": {"flops_per_sample": "many"}}])


# --- how long it takes


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve batches of half a second, an evaluation of 24 s after every fourth: the exact time, from the first one on."""
    logger = MemoryLogger()
    callbacks = [Clock(monkeypatch), {"runtime-estimator": {"every": "1ba"}}]
    trainer = make(callbacks=callbacks, loggers=[logger], duration="12ba", eval_data=batches(), eval_every="4ba")
    trainer.fit()
    left = dict(logger.metrics["time/remaining_seconds"])
    assert 1 not in left, "the first batch warms up"
    for batch in (2, 3, 4):
        assert left[batch] == pytest.approx((12 - batch) * 0.5), "nobody knows yet what an evaluation takes"
    for batch in range(5, 13):
        assert left[batch] == pytest.approx((12 - batch) * 0.5 + 24 * (3 - batch // 4))


# --- memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say how much memory was used")
def test_resident_memory_is_what_the_system_says() -> None:
    logger = MemoryLogger()
    trainer = make(callbacks=[{"memory-monitor": {"every": "1ba"}}], loggers=[logger])
    trainer.fit("1ba")
    block = torch.ones(60_000_000)  # 240 MB
    trainer.fit("1ba")
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    values = [value for _, value in logger.metrics["memory/resident_peak"]]
    assert values[-1] == pytest.approx(peak, rel=0.02)
    assert values[-1] >= block.numel() * 4


# --- learning rates


def test_every_group_of_every_optimizer() -> None:
    """As the step used it; a schedule writes into a rate that is a tensor, which compiled steps have captured."""
    model, logger, rate = network(), MemoryLogger(), torch.tensor(0.125)
    first, second, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    optimizers = [torch.optim.SGD(groups), torch.optim.Adam(others, lr=rate)]
    trainer = make(
        model=model,
        optimizer=optimizers,
        schedule="linear(alpha_f=0)",
        callbacks=["lr-monitor"],
        loggers=[logger],
        duration="4ba",
    )
    values = logged(trainer, logger)
    assert values["lr/optimizer0/group0"] == [0.5, 0.5 * 3 / 4, 0.5 / 2, 0.5 / 4]
    assert values["lr/optimizer0/group1"] == [0.25, 0.25 * 3 / 4, 0.25 / 2, 0.25 / 4]
    assert values["lr/optimizer1/group0"] == [0.125, 0.125 * 3 / 4, 0.125 / 2, 0.125 / 4]
    assert optimizers[1].param_groups[0]["lr"] is rate


def test_a_group_that_is_added_while_training() -> None:
    class Unfreeze(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                state.optimizers[0].add_param_group({"params": [state.model[2].weight], "lr": 0.25})

    model, logger = network(), MemoryLogger()
    trainer = make(
        model=model,
        optimizer=torch.optim.SGD(model[0].parameters(), lr=0.5),
        callbacks=[Unfreeze(), "lr-monitor"],
        loggers=[logger],
        duration="4ba",
    )
    trainer.fit()
    assert logger.metrics["lr/group0"] == [(batch, 0.5) for batch in (1, 2, 3, 4)]
    assert logger.metrics["lr/group1"] == [(batch, 0.25) for batch in (3, 4)]


# --- norms


def test_norms_are_those_of_a_plain_loop() -> None:
    logger = MemoryLogger()
    trainer = make(callbacks=[{"optimizer-monitor": {"every": 1}}], loggers=[logger], clip_gradients=0.01)
    values = logged(trainer, logger)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected: dict[str, list[float]] = {}

    def note(name: str, tensors: list[Tensor]) -> None:
        norm = math.sqrt(sum(float((tensor.detach().double() ** 2).sum()) for tensor in tensors))
        expected.setdefault(f"optimizer/{name}", []).append(norm)

    for inputs, targets in batches() * 2:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        parameters = dict(model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        note("gradient_norm", [parameter.grad for parameter in parameters.values()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        updates = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
        note("weight_norm", list(parameters.values()))
        note("update_norm", list(updates.values()))
        for key in ("exp_avg", "exp_avg_sq"):
            note(f"{key}_norm", [optimizer.state[parameter][key] for parameter in parameters.values()])
    assert {name for name in values if name.startswith("optimizer/")} == set(expected)
    for name, norms in expected.items():
        assert values[name] == pytest.approx(norms, rel=1e-4), name


# --- what is not finite


class Root(nn.Module):
    """The gradient of a square root at zero is infinite, although the loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.root = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) + self.root.sqrt()


def test_the_gradient_that_is_not_finite_is_named() -> None:
    model = Root()
    trainer = make(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        callbacks=[{"nan-monitor": {"every": 1}}],
    )
    trainer.fit("3ba")
    with torch.no_grad():
        model.root[1] = 0.0
    with pytest.raises(FloatingPointError, match=r"in batch 3: root \(1 of 5 gradients\).*detect_anomaly=True"):
        trainer.fit("1ba")


@pytest.mark.filterwarnings("ignore:The last fit raised")
def test_parameters_and_buffers_are_named_where_asked_for() -> None:
    model = Root()
    trainer = make(model=model, callbacks=[NaNMonitor(1, parameters=True, buffers=True)])
    trainer.fit("1ba")
    model.seen.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"in batch 1: seen \(1 of 1 buffers\)"):
        trainer.fit("1ba")
    model.seen.zero_()
    with torch.no_grad():
        model.root[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"the loss; root \(1 of 5 parameters\)") as raised:
        trainer.fit("1ba")
    assert "An earlier step made them non-finite" in str(raised.value)


@pytest.mark.parametrize("at", [3, 9])
def test_a_gradient_between_two_looks(at: int) -> None:
    """It is found in its own batch where that is looked at, and in the next otherwise: by what it has spoilt."""
    model = Root()
    trainer = make(model=model, callbacks=[{"nan-monitor": {"every": 10}}], duration="30ba")
    trainer.fit(f"{at}ba")
    with torch.no_grad():
        model.root[1] = 0.0
    found = "root (1 of 5 gradients)" if at == 9 else "the loss; root (1 of 5 parameters)"
    with pytest.raises(
        FloatingPointError, match=f"batch {at + (at != 9)}: {found.replace('(', '.').replace(')', '.')}"
    ):
        trainer.fit("20ba")


def test_looks_need_a_number_of_batches() -> None:
    for every in (0, "10", True):
        for kind in (NaNMonitor, OptimizerMonitor):
            with pytest.raises(ValueError, match=rf"every={every!r} .*1 or more"):
                kind(every)


# --- stopping early


class Scripted:
    """A metric that is, at one evaluation after the other, what the script says."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.evaluations = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> float:
        self.evaluations += 1
        return self.values[self.evaluations - 1]

    def reset(self) -> None:
        pass


class Remember(hocket.Callback):
    """The weights at every evaluation."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def eval_end(self, state: hocket.State) -> None:
        self.weights.append({name: value.clone() for name, value in state.model.state_dict().items()})


class Stopped:
    """A run of at most twelve batches with an evaluation after each."""

    def __init__(self, script: list[float], monitor: str = "eval/score", **arguments: Any) -> None:
        remember = Remember()
        self.stop = EarlyStopping(monitor, **{"mode": "max", "patience": 2, **arguments})
        self.trainer = make(
            callbacks=[remember, self.stop], metrics={monitor.removeprefix("eval/"): Scripted(*script)}, duration="12ba",
            eval_data=batches(), eval_every="1ba",
        )  # fmt: skip
        self.result = self.trainer.fit()
        self.weights = self.trainer.model_state_dict()
        self.at = remember.weights

    def has_weights_of(self, evaluation: int) -> bool:
        return all(torch.equal(value, self.at[evaluation][name]) for name, value in self.weights.items())


@pytest.mark.parametrize(
    "script, arguments, stops_at, best",
    [
        ([1, 3, 2, 3, 9], {}, 4, 1),  # the same again is no improvement
        ([1, 3, 2, 4, 3, 3, 9], {}, 6, 3),
        ([5, 4, 3, 4, 4, 0], {"mode": "min"}, 5, 2),
        ([5, 4, 3, 4, 4, 0], {"monitor": "eval/score_loss", "mode": None}, 5, 2),
        ([1.0, 1.05, 1.09, 2.0], {"min_delta": 0.1}, 3, 0),
        ([1.0, 1.05, 1.11, 1.15, 1.2, 9.0], {"min_delta": 0.1}, 5, 2),
        ([1, math.nan, math.inf, 9], {}, 3, 0),
        ([1, 0, 0, 0, 0, 9], {"patience": "4ba"}, 5, 0),
        ([1, 0, 2, 0, 0, 0, 0, 9], {"patience": "0.25dur"}, 6, 2),
    ],
)
def test_it_stops_and_goes_back_to_the_best(
    script: list[float], arguments: dict[str, Any], stops_at: int, best: int
) -> None:
    run = Stopped(script, **arguments)
    monitor = arguments.get("monitor", "eval/score")
    assert run.result.timestamp.batch == stops_at == len(run.at)
    assert run.result.metrics[monitor] == script[best] == run.stop.best
    assert f"{monitor} has not improved on {script[best]:g}" in run.result.stop_reason
    assert run.has_weights_of(best) and not run.has_weights_of(-1)


def test_without_going_back() -> None:
    run = Stopped([3, 2, 1, 0], restore_best=False)
    assert run.result.timestamp.batch == 3 and run.result.metrics["eval/score"] == 1
    assert run.has_weights_of(-1)


def test_a_run_that_never_stalls_ends_with_its_best() -> None:
    run = Stopped([1, 2, 3, 4, 9, 5, 10, 11, 12, 13, 14, 13.5])
    assert run.result.timestamp.batch == 12 and not run.result.stop_reason
    assert run.has_weights_of(10)


def test_a_stop_leaves_the_rest_of_the_patience_to_the_next_fit() -> None:
    stop = EarlyStopping("eval/score", "max", patience=2)
    script = Scripted(5, 1, 1, 1, 1, 6, 1, 1, 1)
    trainer = make(callbacks=[stop], metrics={"score": script}, eval_data=batches(), eval_every="1ba", duration="12ba")
    assert [trainer.fit().timestamp.batch for _ in range(3)] == [3, 5, 8]
    assert stop.best == 6


def test_what_can_never_be_watched_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no evaluation set of that name\. The sets are: 'eval'"):
        make(callbacks=[EarlyStopping("test/loss")], eval_data=batches()).fit()
    with pytest.raises(ValueError, match=r"measures only 'eval/loss', because metrics= is empty"):
        make(callbacks=[EarlyStopping("eval/accuracy")], eval_data=batches()).fit()
    with pytest.raises(ValueError, match=r"Write metrics='accuracy' in the Trainer, and monitor 'eval/accuracy'; or"):
        make(callbacks=[EarlyStopping("eval/acuracy", "max")], eval_data=batches()).fit()
    with pytest.raises(ValueError, match=r"Write metrics=\{'f1': …\} in the Trainer, with a metric of torchmetrics"):
        make(callbacks=[EarlyStopping("eval/f1", "max")], eval_data=batches()).fit()
    with pytest.raises(ValueError, match="pass mode='max' or mode='min'"):
        EarlyStopping("eval/score")
    with pytest.raises(ValueError, match="patience of at least one"):
        EarlyStopping("eval/loss", patience=0)
    with pytest.warns(UserWarning, match="evaluated on request only"):
        make(callbacks=[EarlyStopping("eval/loss")], eval_data=batches(), eval_every=None).fit()


# --- every callback beside what the Trainer does

FEATURES: list[dict[str, Any]] = [
    {"microbatch": "auto"}, {"microbatch": 2}, {"accumulate": "2ba"}, {"fast_dev_run": 2}, {"clip_gradients": 0.01},
    {"profile_plugins": True, "summary": True},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:energy-monitor")  # no counter on most machines
@pytest.mark.parametrize("changes", FEATURES, ids=lambda each: next(iter(each)))
def test_callbacks_change_no_weight_beside_what_the_trainer_does(changes: dict[str, Any], tmp_path: Path) -> None:
    assert len(installed_callbacks()) > 15
    if changes.get("microbatch") == "auto":
        pytest.importorskip("hocket_general")

    def trained(*callbacks: dict[str, Any]) -> list[Tensor]:
        folder = tmp_path / "-".join(["runs", *(name for each in callbacks for name in each)])  # auto remembers in it
        given = {"callbacks": list(callbacks), "eval_data": batches(), "loggers": ["jsonl"], "folder": str(folder)}
        model = nn.Sequential(nn.Dropout(), network())  # which draws random numbers that no callback may draw
        with make(**given, model=model, duration="2ep", seed=1, **changes) as trainer:
            trainer.fit()
            trainer.evaluate()
            return weights(trainer)

    expected = trained()
    for name in installed_callbacks():
        assert same(trained({name: callback_config(name, 1)}), expected), name


# --- every callback, stopped within an epoch and resumed


class Killed(Exception):
    """Raised by a test in the middle of an epoch."""


class Kill(hocket.Callback):
    def __init__(self, after: int) -> None:
        self._after = after

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == self._after:
            raise Killed


#: Values of clocks and counters of the machine: of these, names and steps are compared; of the others, which a thread takes
#: or which begin in each process after a warm-up, the names.
MEASURED = ("time/", "speed/", "memory/")
BY_PROCESS = ("system/", "energy/", "time/remaining_seconds", "profile")


def rows(folder: Path) -> dict[str, list[Any]]:
    """Return the values of each name in what jsonl wrote, with their positions."""
    found: dict[str, list[Any]] = {}
    for file in (folder / "metrics.jsonl", folder / "media" / "metrics.jsonl"):
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            at = [row.pop(key, None) for key in ("seconds", "epoch", "batch", "sample", "token")][1:]
            if row.pop("hyperparameters", None):  # of the Trainer that kills
                row = {"hyperparameters": None}
            row.pop("run", None)
            kind = next((key for key in ("images", "table", "text", "histogram") if key in row), None)
            for name, value in row.items() if kind is None else [(row[kind], row)]:
                positions = found.setdefault(name, [])
                if not name.startswith(BY_PROCESS):
                    positions.append((at, None if name.startswith(MEASURED) else value))
    return found


def run(folder: Path, callbacks: list[Any], stops: tuple[int, ...] = ()) -> tuple[dict[str, list[Any]], list[Tensor]]:
    """Train 12 batches of 2 epochs in one folder, killed after each of ``stops`` and resumed; return rows and weights."""
    for stop in (*stops, None):
        extra = [] if stop is None else [Kill(stop)]
        trainer = make_trainer(
            model=make_model(dropout=0.5), train_data=make_data(84, 14), eval_data=make_data(24), eval_every="2ba",
            optimizer=momentum, schedule="linear", log_every="3ba", seed=1, device="cpu", folder=folder, run_name="run",
            loggers=["jsonl"], checkpoints=hocket.Checkpoints(folder / "checkpoints", every="5ba"), resume="auto",
            callbacks=[*callbacks, *extra],
        )  # fmt: skip
        with trainer, nullcontext() if stop is None else pytest.raises(Killed):
            trainer.fit()
    return rows(folder / "run"), weights(trainer)


#: Callbacks that end the run, by what a checkpoint has to keep.
ENDING: dict[str, dict[str, Any]] = {
    "early-stopping": {"monitor": "eval/loss", "min_delta": 10.0, "patience": 4},
    "threshold-stopper": {"monitor": "train/loss", "above": 0.0, "times": 3},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    return run(tmp_path_factory.mktemp("plain"), [])[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:energy-monitor")
@pytest.mark.parametrize("name", installed_callbacks())
@pytest.mark.parametrize(
    ("every", "stops"),
    [pytest.param(4, (8,), id="killed"), pytest.param(2, (7, 11), id="killed-twice", marks=pytest.mark.long)],
)
def test_callbacks_log_the_same_in_a_run_that_was_killed(
    name: str, every: int, stops: tuple[int, ...], plain: list[Tensor], tmp_path: Path
) -> None:
    """With ``every=4`` what they measured in batch 4 waits in the checkpoint of batch 5 for the row of batch 6."""
    config = {name: callback_config(name, every)}
    expected, trained = run(tmp_path / "whole", [config])
    logged, resumed = run(tmp_path / "resumed", [config], stops)
    assert same(resumed, trained) and same(trained, plain)
    assert logged == expected


@pytest.mark.parametrize("name", ENDING)
def test_callbacks_end_a_run_that_was_killed_where_they_end_a_whole_one(name: str, tmp_path: Path) -> None:
    expected, trained = run(tmp_path / "whole", [{name: ENDING[name]}])
    assert 8 < max(at[1] for at, _ in expected["train/loss"]) < 12
    logged, resumed = run(tmp_path / "resumed", [{name: ENDING[name]}], stops=(8,))
    assert same(resumed, trained) and logged == expected
