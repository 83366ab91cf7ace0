"""Whatever raises, wherever: processes, files, modes and random numbers are as before, and a later fit may follow."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket_testkit.footprint import changed, footprint


class Planned(Exception):
    """What these tests raise."""


class Samples(Dataset[Any]):
    """16 samples; the one called ``bad`` cannot be read, until that is mended."""

    def __init__(self, bad: int | None = None) -> None:
        # Shared, so that worker processes notice that it was mended.
        self.bad = torch.tensor(-1 if bad is None else bad).share_memory_()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise Planned("an unreadable sample")
        return torch.full((8,), index / 16), index % 3


class Network(nn.Module):
    """Draws random numbers, has a submodule that the user froze in eval mode, and raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.norm.eval()
        self.fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise Planned("in the model")
        return self.head(self.dropout(self.norm(inputs)))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def workers() -> list[Any]:
    gc.collect()
    return torch.multiprocessing.active_children()


def different(before: dict[str, Any]) -> list[str]:
    """What of the process is not as before; threads that feed the queues of ended workers may take a moment to end."""
    deadline = time.monotonic() + 30
    while "running threads" in (found := changed(before, footprint())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def open_files() -> list[str]:
    """Paths that this process has open for writing below the working directory, where runs are kept."""
    here = str(Path.cwd())
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor that listed the folder
        if path.startswith(here):
            paths.append(path)
    return paths


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    assert not workers()
    yield
    assert not workers()


@pytest.fixture(autouse=True, scope="module")
def _torch_listens_for_the_death_of_children() -> None:
    """With the first loader with workers in a process, torch installs a signal handler once and for all."""
    list(DataLoader([0], num_workers=1))


def make(train: Any = None, **changes: Any) -> hocket.Trainer:
    loader = DataLoader(Samples(), 4) if train is None else train
    model = changes.get("model") or Network()  # which draws random numbers
    return make_trainer(**{"train_data": loader, "log_every": "1ba", "seed": 3, **changes, "model": model})


class Fail(hocket.Callback):
    """Raises on one event, once the timestamp counts so many batches."""

    def __init__(self, event: str, batch: int = 0) -> None:
        def fail(state: hocket.State) -> None:
            if state.timestamp.batch >= batch and not self.mended:
                raise Planned(event)

        self.mended = False
        setattr(self, event, fail)


@pytest.mark.filterwarnings("ignore:The last fit raised")
@pytest.mark.parametrize(
    "event",
    ["fit_start", "after_dataloader", "after_forward", "after_backward", "batch_end", "eval_after_forward", "fit_end"],
)
def test_a_hook_that_raises(event: str) -> None:
    """Modes, gradient mode, random numbers, deterministic and anomaly switches, files: as before. Then training goes on."""
    fail = Fail(event, batch=0 if event == "fit_start" else 1)
    trainer = make(
        callbacks=[fail], eval_data=DataLoader(Samples(), 4), eval_every="2ba", loggers=["jsonl"], duration="3ba",
        detect_anomaly=True, deterministic=True, algorithms=[{"ema": {"half_life": "1ba"}}],
    )  # fmt: skip
    model = trainer.state.model
    before, mode = footprint(), modes(model)
    with pytest.raises(Planned, match=event):
        trainer.fit()
    assert not different(before)
    assert modes(model) == mode and not mode[1], "the frozen norm too"
    assert not open_files()
    assert trainer.state.exception is None and trainer.state.eval_label is None
    fail.mended = True
    done = trainer.state.timestamp.batch
    assert trainer.fit("2ba").timestamp.batch == done + 2
    trainer.close()
    assert not open_files()


def test_open_files_are_noticed() -> None:
    """So that their absence above means something."""
    trainer = make(loggers=["jsonl"])
    trainer.fit("1ba")
    assert [Path(path).name for path in open_files()] == ["metrics.jsonl"]
    trainer.close()
    assert not open_files()


@pytest.mark.filterwarnings("ignore:The last fit raised")
@pytest.mark.parametrize("kind", ["train", "evaluate", "predict"])
def test_a_model_that_raises(kind: str) -> None:
    trainer = make(eval_data=DataLoader(Samples(), 4))
    model = trainer.state.model
    trainer.fit("1ba")
    before, mode, weights = footprint(), modes(model), [p.clone() for p in model.parameters()]
    model.fails = True
    with pytest.raises(Planned, match="in the model"):
        {"train": trainer.fit, "evaluate": trainer.evaluate, "predict": lambda: trainer.predict([torch.zeros(2, 8)])}[
            kind
        ]()
    assert not different(before) and modes(model) == mode
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    model.fails = False
    assert trainer.fit("1ba").timestamp.batch == 2


@pytest.mark.parametrize("kind", ["train", "eval", "standalone", "predict"])
def test_a_data_set_that_raises_in_a_worker(kind: str) -> None:
    """The worker processes end with the exception, in whichever loader it was."""
    samples = Samples(bad=9)
    loader, good = DataLoader(samples, 4, num_workers=2), DataLoader(Samples(), 4)
    trainer = make(loader if kind == "train" else good, eval_data=loader if kind == "eval" else None)
    before = footprint()
    with pytest.raises(Planned, match="unreadable"):
        if kind == "standalone":
            trainer.evaluate(loader)
        elif kind == "predict":
            trainer.predict(loader)
        else:
            trainer.fit("1ep")
    assert not workers()
    assert not different(before)
    samples.bad.fill_(-1)
    done = trainer.state.timestamp.batch
    assert trainer.fit("4ba").timestamp.batch == done + 4
    trainer.close()


def test_persistent_workers_of_the_training_data() -> None:
    samples = Samples(bad=9)
    trainer = make(DataLoader(samples, 4, num_workers=1, persistent_workers=True))
    with pytest.raises(Planned, match="unreadable"):
        trainer.fit()
    assert not workers()
    samples.bad.fill_(-1)
    trainer.fit("1ep")
    trainer.close()
    assert not workers()


def test_closing_within_an_epoch_ends_workers() -> None:
    trainer = make(DataLoader(Samples(), 4, num_workers=1))
    trainer.fit("2ba")
    assert workers(), "the pass is not over, and the next fit continues it"
    trainer.close()
    assert not workers()


def test_a_trainer_that_is_forgotten_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without close(): nobody is left, and plug-ins were told."""
    # How long torch waits for the worker of a loader that is collected with all that could tell it to end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    closed: list[str] = []

    class Watch(hocket.Callback):
        def close(self, state: hocket.State) -> None:
            closed.append(state.run_name)

    trainer = make(
        DataLoader(Samples(), 4, num_workers=1), callbacks=[Watch()], loggers=["jsonl"], run_name="forgotten"
    )
    trainer.fit("2ba")
    del trainer
    assert not workers() and not open_files()
    assert closed == ["forgotten"]


def test_an_interruption_is_an_exception_too() -> None:
    """Control-C closes, and nothing swallows it."""
    heard: list[str] = []

    class Interrupt(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            raise KeyboardInterrupt

        def exception(self, state: hocket.State) -> None:
            heard.append(type(state.exception).__name__)

        def close(self, state: hocket.State) -> None:
            heard.append("close")

    trainer = make(DataLoader(Samples(), 4, num_workers=1), callbacks=[Interrupt()])
    before = footprint()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert heard == ["KeyboardInterrupt", "close"]
    assert not workers() and not different(before)


@pytest.mark.parametrize("fault", ["a foreign optimizer", "surgery", "metrics"])
def test_a_trainer_that_cannot_be_made(fault: str) -> None:
    """What was attached by then is closed, and the caller's random numbers are as before."""
    closed: list[bool] = []

    class Watch(hocket.Callback):
        def close(self, state: hocket.State) -> None:
            closed.append(True)

    class Surgery(hocket.Algorithm):
        events = {hocket.Event.INIT}

        def apply(self, event: hocket.Event, state: hocket.State) -> None:
            torch.rand(3)
            raise Planned("no such layer")

    changes: dict[str, Any] = {
        "a foreign optimizer": {"optimizer": torch.optim.SGD(Network().parameters(), lr=0.1)},
        "surgery": {"algorithms": [Surgery()]},
        "metrics": {"eval_data": DataLoader(Samples(), 4), "metrics": {"none": object()}},
    }
    model = Network()
    before = footprint()
    with pytest.raises((Planned, ValueError, TypeError)):
        make(model=model, callbacks=[Watch()], **changes[fault])
    assert closed == [True]
    assert not different(before)
