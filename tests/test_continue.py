"""After an exception the same Trainer continues exactly, says what is not exact, or refuses."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_trainer, momentum, same
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.schedules import Constant


class Planned(Exception):
    """Raised by these tests."""


class Samples(Dataset[Any]):
    """24 samples; raises when asked for one the first time, in this process or in a worker."""

    def __init__(self, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs, self.targets = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
        self.bad = torch.tensor([bad]).share_memory_()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == self.bad.item():
            self.bad.fill_(-1)
            raise Planned(f"sample {index}")
        return self.inputs[index], self.targets[index]


class Network(nn.Module):
    """Raises once, in the forward pass of a batch that is trained on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3))
        self.fails_at = -1
        self.seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        if self.seen == self.fails_at:
            self.fails_at = -1
            raise KeyboardInterrupt
        return self.layers(inputs)


class Mean:
    """A metric by hand."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.seen = 0.0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.total, self.seen = self.total + float(outputs.double().sum()), self.seen + len(targets)

    def compute(self) -> float:
        return self.total / self.seen


class Once(hocket.Callback):
    """Does something on an event after so many batches, once."""

    def __init__(self, event: str, batch: int, act: Any) -> None:
        def listener(state: hocket.State) -> None:
            if state.timestamp.batch >= batch and act:
                act.pop()()

        act = [act]
        setattr(self, event, listener)


def planned() -> None:
    raise Planned("by a plug-in")


def control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    """A process in the background begins without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "as it was"


def make(data: Any = None, dropout: float = 0.2, **changes: Any) -> hocket.Trainer:
    eval_data = {"a": DataLoader(Samples(), 8), "b": hocket.EvalSet(DataLoader(Samples(), 12), every="4ba")}
    arguments = {
        "model": Network(dropout), "train_data": data or DataLoader(Samples(), 4, shuffle=True), "optimizer": momentum,
        "eval_data": eval_data, "train_metrics": {"mean": Mean()}, "metrics": {"mean": Mean()}, "seed": 3, "eval_every": "3ba",
        "schedule": "cosine(warmup=0.2dur)", "algorithms": ["ema", "label-smoothing"], "log_every": "2ba",
    }  # fmt: skip
    return make_trainer(**{**arguments, **changes})


def outcome(trainer: hocket.Trainer) -> dict[str, Any]:
    """All that a fit changes, but for seconds, and for the history, in which evaluations between fits are too."""
    tree = trainer.state_dict()
    for stamp in (tree["timestamp"], tree["previous"]):
        for name in [name for name in stamp if name.endswith("seconds")]:
            del stamp[name]
    return {name: tree[name] for name in tree if name not in ("run_name", "run_id", "attached", "history")}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    trainer = make(callbacks=[Once("before_dataloader", 99, planned)])
    trainer.fit()
    return outcome(trainer)


EXACT = ["fit_start", "before_dataloader", "eval_after_forward", "batch_checkpoint", "epoch_checkpoint", "fit_end"]


@pytest.mark.parametrize("event", EXACT)
def test_between_batches_a_fit_continues_exactly(event: str, expected: Any) -> None:
    trainer = make(callbacks=[Once(event, 0 if event == "fit_start" else 5, planned)])
    with pytest.raises(Planned):
        trainer.fit()
    done = trainer.state.timestamp.batch
    trainer.evaluate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "EMA's half-life")
        trainer.fit()
    assert done == {"fit_start": 0, "epoch_checkpoint": 6, "fit_end": 12, "eval_after_forward": 6}.get(event, 5)
    assert same(outcome(trainer), expected)


@pytest.mark.parametrize("event", ["after_forward", "batch_end", "eval_after_forward", "before_dataloader"])
def test_control_c_waits_for_the_end_of_the_batch(event: str, expected: Any) -> None:
    trainer = make(callbacks=[Once(event, 4, control_c)])
    with pytest.raises(KeyboardInterrupt, match="continues after it"):
        trainer.fit()
    assert trainer.state.progress.ready == trainer.state.progress.processed < 12
    tree = copy.deepcopy(trainer.state_dict())  # training changes its tensors
    trainer.fit()
    assert same(outcome(trainer), expected)
    other = make(callbacks=[Once("before_dataloader", 99, planned)])
    other.load_state_dict(tree)
    other.fit()
    assert same(outcome(other), expected), "in another process too"


def test_control_c_in_the_last_batch_interrupts_after_the_fit(expected: Any) -> None:
    trainer = make(callbacks=[Once("fit_end", 12, control_c)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert same(outcome(trainer), expected)
    with pytest.warns(UserWarning, match="Training is over"):
        trainer.fit()


def test_control_c_again_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 2.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    trainer = make(callbacks=[Once("after_forward", 4, lambda: [control_c() for _ in range(3)])])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.state.progress.started == 5 and trainer.state.progress.processed == 4


def test_a_signal_handler_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    make(callbacks=[Once("after_forward", 4, control_c)]).fit("6ba")
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Stream:
    """Batches that can be iterated anew and do not say where they are; raises once."""

    def __init__(self, bad: int = -1) -> None:
        self._bad, self._samples = bad, Samples()

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for batch in range(6):
            if batch == self._bad:
                self._bad = -1
                raise Planned("the stream")
            yield self._samples[slice(4 * batch, 4 * batch + 4)]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_raises_is_asked_again(workers: int) -> None:
    def run(bad: int) -> Any:
        trainer = make(DataLoader(Samples(bad), 4, shuffle=True, num_workers=workers))
        if bad >= 0:
            with pytest.raises(Planned):
                trainer.fit()
            assert trainer.state.timestamp.batch_in_epoch > 0
        trainer.fit()
        return trainer.state.model.layers.state_dict(), trainer.state.progress

    (weights, progress), (again, after) = run(-1), run(9)
    assert same(dict(weights), dict(again)) and progress == after


def test_a_stream_that_raises_is_read_again() -> None:
    def run(bad: int) -> Any:
        trainer = make(Stream(bad))
        if bad >= 0:
            with pytest.raises(Planned), pytest.warns(UserWarning, match="reads the past batches of the current epoch"):
                trainer.fit()
        trainer.fit()
        return dict(trainer.state.model.layers.state_dict())

    assert same(run(-1), run(4))


def test_an_iterator_that_raises_is_lost_and_other_data_is_not() -> None:
    trainer = make(iter(Stream(4)), duration="8ba")
    with pytest.raises(Planned):
        trainer.fit()
    with pytest.raises(hocket.data.errors.DataError, match=r"iterator, which cannot be restarted.*train_data="):
        trainer.fit()
    assert trainer.fit(train_data=Stream()).timestamp.batch == 8


@pytest.mark.parametrize(("microbatch", "workers"), [(None, 0), (2, 0), (None, 1)])
def test_before_the_optimizer_stepped_the_batch_is_repeated_and_that_is_said(
    microbatch: int | None, workers: int
) -> None:
    options = {"dropout": 0.0, "train_metrics": None, "algorithms": ["ema"], "microbatch": microbatch}

    def run(fails_at: int) -> Any:
        trainer = make(DataLoader(Samples(), 4, shuffle=True, num_workers=workers), **options)
        trainer.state.model.fails_at = fails_at
        if fails_at >= 0:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            assert trainer.state.timestamp.batch == (fails_at - 1) * (microbatch or 4) // 4
            with pytest.raises(RuntimeError, match="not complete"):
                trainer.state_dict()
            with pytest.warns(UserWarning, match=r"KeyboardInterrupt in batch \d.*continues with that batch"):
                trainer.fit()
        return one_more(trainer)

    def whole() -> Any:
        trainer = make(DataLoader(Samples(), 4, shuffle=True, num_workers=workers), **options)
        trainer.fit()
        return one_more(trainer)

    def one_more(trainer: hocket.Trainer) -> dict[str, Any]:
        with trainer:
            trainer.fit("1ba")
            found = outcome(trainer)
        return {name: value for name, value in found.items() if name not in ("fit", "max_duration")}

    assert same(run(6), whole())


@pytest.mark.parametrize("event", ["batch_end", "epoch_end", "epoch_start"])
def test_an_event_that_not_all_have_heard_is_said(event: str, expected: Any) -> None:
    trainer = make(callbacks=[Once(event, 5, planned)])
    with pytest.raises(Planned):
        trainer.fit()
    with pytest.warns(UserWarning, match=f"Planned: by a plug-in in {event} after batch"):
        trainer.fit()
    assert same(outcome(trainer), expected), "algorithms come first"


@pytest.mark.parametrize("where", ["optimizer", "schedule"])
def test_where_weights_may_be_half_updated_a_fit_is_refused(where: str) -> None:
    class Half(torch.optim.SGD):
        fails = where == "optimizer"

        def step(self, closure: Any = None) -> Any:
            if self.fails and self.state:
                raise Planned("out of memory")
            return super().step(closure)

    def schedule(clock: Any) -> float:
        if where == "schedule" and clock.timestamp.batch == 2:
            raise Planned("no such point")
        return 1.0

    trainer = make(optimizer=lambda parameters: Half(parameters, lr=0.1, momentum=0.9), schedule=schedule)
    good = trainer.state_dict()
    with pytest.raises(Planned):
        trainer.fit()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"raised Planned.*while weights or learning rates were updated.*resume='auto'"
        ):
            trainer.fit()
    assert trainer.evaluate(), "the weights can be looked at"
    Half.fails = False
    trainer.load_state_dict(good)
    assert trainer.fit("1ba").timestamp.batch == 1


def test_a_fit_of_its_own_duration_is_finished_by_the_same_call() -> None:
    trainer = make(callbacks=[Once("batch_checkpoint", 2, planned)], duration=None)
    with pytest.raises(Planned):
        trainer.fit("4ba")
    assert trainer.fit("4ba").timestamp.batch == 4
    assert trainer.fit("4ba").timestamp.batch == 8


def test_after_an_exception_in_between_the_epoch_continues() -> None:
    def run(fail: bool) -> Any:
        trainer = make(DataLoader(Samples(), 4, shuffle=True, num_workers=1))
        trainer.fit("3ba")
        if fail:
            with pytest.raises(Planned):
                trainer.evaluate(DataLoader(Samples(0), 8))
            trainer.close()
        trainer.fit("5ba")
        return dict(trainer.state.model.layers.state_dict())

    assert same(run(False), run(True))


@pytest.mark.long
def test_close_is_heard_once_and_again_after_the_next_use() -> None:
    heard: list[str] = []

    class Watch(hocket.Callback):
        def close(self, state: hocket.State) -> None:
            heard.append("close")

    with make(callbacks=[Watch()]) as trainer:
        trainer.fit("1ba")
    trainer.close()
    assert heard == ["close"]
    assert trainer.fit("1ba").timestamp.batch == 2 and trainer.predict([torch.zeros(2, 4)]) and heard == ["close"]
    del trainer
    assert heard == ["close", "close"]


@pytest.mark.parametrize(
    ("data", "duration"),
    [
        (lambda batches: iter(batches), "2ep"),
        (lambda batches: (batch for batch in batches), "2ep"),
        (lambda batches: iter(DataLoader(Samples(), 4)), "2ep"),
        (lambda batches: iter(batches), "7ba"),
    ],
)
def test_an_iterator_is_refused_before_training_where_it_does_not_last(data: Any, duration: str) -> None:
    batches = list(DataLoader(Samples(), 4))
    trainer = make(data(batches), duration=duration)
    with pytest.raises(hocket.data.errors.DataError, match=r"is an iterator.*once.*the list or the DataLoader itself"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
    assert make(data(batches), duration="6ba", schedule=None).fit().timestamp.batch == 6


# --- resuming with another configuration


def resumed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is said when a run continues with other arguments."""
    usual: dict[str, Any] = {"algorithms": [], "schedule": None}
    one = make(**{**usual, **before})
    one.fit("1ba")
    other = make(**{**usual, **now})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        other.load_state_dict(one.state_dict())
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (
            {"algorithms": [{"ema": {"smoothing": 0.5}}]},
            {"algorithms": [{"ema": {"smoothing": 0.9}}]},
            "smoothing of the algorithm 'ema' was 0.5, is 0.9",
        ),
        (
            {"algorithms": ["label-smoothing"]},
            {"algorithms": [{"label-smoothing": {"smoothing": 0.2}}]},
            "'label-smoothing' was 0.1, is 0.2",
        ),
        (
            {"algorithms": ["ema", "label-smoothing"]},
            {"algorithms": ["label-smoothing", "ema"]},
            "order of algorithms was ema, label-smoothing, is label-smoothing, ema",
        ),
        ({}, {"precision": "bf16"}, "precision was fp32, is bf16"),
        ({}, {"clip_gradients": 1.0}, "clip_gradients was None, is 1.0"),
        ({"schedule": Constant(0.5)}, {"schedule": Constant(0.7)}, "schedule was Constant(warmup='0ba', alpha=0.5)"),
        ({}, {"optimizer": "sgd(lr=0.3, momentum=0.9)"}, "optimizers.0.lr was and stays 0.1, not 0.3"),
    ],
)
def test_another_configuration_is_said_in_one_line(before: Any, now: Any, words: str) -> None:
    (said,) = resumed(before, now)
    assert "configured differently from the checkpoint's" in said and words in said


@pytest.mark.filterwarnings("ignore:Network.seen changed in training")
@pytest.mark.parametrize("schedule", [None, "linear"])
def test_a_resumed_run_records_the_learning_rate_in_effect(schedule: str | None, tmp_path: Path) -> None:
    """In which the optimizer's own parameter group says what is in effect."""

    def run(rate: float, until: str, change: float | None = None) -> tuple[float, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make(
                algorithms=[], schedule=schedule, optimizer=f"sgd(lr={rate})", duration="9ep",
                checkpoints=str(tmp_path / "runs"), resume="auto",
            )  # fmt: skip
            said = [str(each.message) for each in caught if "configured differently" in str(each.message)]
        group = trainer.state.optimizers[0].param_groups[0]
        if change is not None:
            group["lr" if schedule is None else "initial_lr"] = change
        with trainer:
            trainer.fit(until)
        return group["lr" if schedule is None else "initial_lr"], [each.partition(";")[0] for each in said]

    assert run(0.1, "1ba") == (0.1, [])
    rate, (said,) = run(0.9, "1ba")
    assert rate == 0.1 and "optimizers.0.lr was and stays 0.1, not 0.9" in said
    assert run(0.1, "1ba") == (0.1, [])
    rate, (said,) = run(0.9, "1ba", change=0.5)
    assert rate == 0.5 and "optimizers.0.lr was and stays 0.1, not 0.9" in said
    assert run(0.5, "1ba") == (0.5, [])


def test_a_learning_rate_that_is_not_loaded_is_not_said_to_stay() -> None:
    usual: dict[str, Any] = {"algorithms": [], "schedule": None}
    one, other = make(**usual), make(**usual, optimizer="sgd(lr=0.3, momentum=0.9)")
    one.fit("1ba")
    tree = one.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(tree, ignore=["optimizers.*"])
    assert other.state.optimizers[0].param_groups[0]["lr"] == 0.3
    assert "0.3" in other.state_dict()["configuration"]["optimizers"]["optimizers.0.lr"]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"duration": "9ep", "log_every": "1ba", "microbatch": 2, "eval_every": None}),
        ({"algorithms": ["label-smoothing"]}, {"algorithms": [{"label-smoothing": {"smoothing": 0.1}}]}),
        ({"schedule": "linear"}, {"schedule": "linear"}),
    ],
)
def test_the_same_configuration_is_not_talked_about(before: Any, now: Any) -> None:
    assert resumed(before, now) == []


def test_values_of_metrics_that_are_gone_are_not_kept() -> None:
    one = make(metrics={"mean": Mean(), "more": Mean()})
    one.fit("1ep")
    tree = one.state_dict()
    same_ones, other = make(metrics={"mean": Mean(), "more": Mean()}), make(metrics={"mean": Mean()})
    for each in (same_ones, other):
        each.load_state_dict(tree)
    assert same_ones.state.metrics == one.state.metrics and {"a/more", "b/more"} < one.state.metrics.keys()
    assert other.state.metrics == {name: value for name, value in one.state.metrics.items() if "more" not in name}
    assert {"a/loss", "a/mean", "b/loss", "b/mean", "train/mean"} <= other.state.metrics.keys()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("samples", "size", "words"),
    [
        (24, 4, []),
        (24, 8, ["a global batch was 4 samples, is 8 samples", "an epoch had 6 batches, has 3"]),
        (48, 4, ["an epoch had 6 batches, has 12"]),
        (48, 8, ["a global batch was 4 samples, is 8 samples"]),
    ],
)
def test_other_data_between_epochs_is_said(samples: int, size: int, words: list[str], late: bool) -> None:
    def loader(samples: int, size: int) -> DataLoader[Any]:
        return DataLoader(torch.utils.data.TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 3), size)

    one = make(loader(24, 4), algorithms=[], schedule=None)
    one.fit("1ep")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = make(train_data=None if late else loader(samples, size), algorithms=[], schedule=None)
        other.load_state_dict(one.state_dict())
        other.fit(*[loader(samples, size)] * late, duration="1ep")
    assert other.state.timestamp.batch == 6 + samples // size
    said = [str(each.message) for each in caught if "differs from the checkpoint's" in str(each.message)]
    assert len(said) == bool(words) and all(each in said[0] for each in words)
    assert not words or said[0].count(";") == len(words) - 1


@pytest.mark.filterwarnings("ignore:Not finite in", "ignore:The last fit raised")
def test_learning_rates_stay_as_the_exception_left_them() -> None:
    """A batch that was skipped has left them a step behind the schedule."""

    class Raises(hocket.Callback):
        def batch_end(self, state: Any) -> None:
            if state.timestamp.batch == 3:
                raise RuntimeError("once")

    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    data[2][0].fill_(float("nan"))
    weights = []
    for callbacks in ([], [Raises()]):
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=nn.Linear(3, 1), loss=F.mse_loss, train_data=data, duration="1ep", nonfinite="skip", schedule="linear",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), device="cpu", callbacks=callbacks,
        )  # fmt: skip
        if callbacks:
            with pytest.raises(RuntimeError, match="once"):
                trainer.fit()
        trainer.fit()
        weights.append([value.tolist() for value in trainer.model_state_dict().values()])
    assert weights[0] == weights[1]
