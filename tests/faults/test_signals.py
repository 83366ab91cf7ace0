"""Runs that are told to end write a checkpoint at the next step boundary, exit with code 75, and go on from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_script
from training_script import differences, make, outcome

import hocket
from hocket.checkpoints.signals import EXIT_CODE, Interrupted
from hocket.testkit import run_ranks
from hocket.training import interruption


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What comes out of so many ranks."""
    known: dict[int, dict[str, Any]] = {}

    def of(ranks: int) -> dict[str, Any]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[ranks] = finish(folder, ranks)
        return known[ranks]

    return of


def finish(folder: Path, ranks: int) -> dict[str, Any]:
    run_ranks(lambda rank: make(folder, policy={"every": None}).fit() and None, ranks)
    return outcome(folder)


class SignalAt(hocket.Callback):
    """Signals its own process, if that is the rank, on an event after so many batches."""

    def __init__(self, batch: int, event: str, rank: int = 0, number: int = signal.SIGTERM) -> None:
        def act(state: hocket.State) -> None:
            if (state.timestamp.batch, state.strategy.rank) == (batch, rank):
                os.kill(os.getpid(), number)

        setattr(self, event, act)


# --- scripts

LAUNCH = ("-c", "import sys; from hocket.cli import main; sys.exit(main())", "launch", "-n", "2")


def processes_of(leader: int) -> list[int]:
    """It and its descendants: workers of torch's agent have sessions of their own."""
    threads = Path(f"/proc/{leader}/task").iterdir()  # each has the children that it started
    below = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [leader, *(each for child in below for each in processes_of(child))]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes")
@pytest.mark.parametrize(
    ("launcher", "devices"),
    [pytest.param((), 2, id="Trainer(devices=2)"), pytest.param(LAUNCH, 0, id="hocket launch")],
)
def test_two_ranks_of_a_job_that_is_told_to_end(
    tmp_path: Path, uninterrupted: Any, launcher: tuple[str, ...], devices: int
) -> None:
    """SIGTERM to all processes, data workers and launcher included, as from a cluster; the launcher passes it on once more."""
    command = [sys.executable, *launcher, training_script.__file__, str(tmp_path), str(devices), "0.3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as started:
        file = tmp_path / "batch"
        until = time.monotonic() + 200
        while (not file.exists() or int(file.read_text() or 0) < 3) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in processes_of(started.pid):
            os.kill(pid, signal.SIGTERM)
        code, errors = started.wait(60), started.stderr.read()
        reached = int(file.read_text())
    assert code == EXIT_CODE, errors
    assert hocket.Checkpoints(tmp_path / "checkpoints").store.names() == [f"ep0-ba{reached}"]
    assert differences(finish(tmp_path / "checkpoints", 2), uninterrupted(2)) == []


# --- forks


@pytest.mark.parametrize(
    ("ranks", "event", "batch", "expected"),
    [
        (1, "batch_start", 7, "ep1-ba8"),
        (2, "batch_start", 7, "ep1-ba8"),
        pytest.param(2, "batch_end", 7, "ep1-ba7", marks=pytest.mark.long),
        pytest.param(2, "epoch_end", 10, "ep2-ba10", marks=pytest.mark.long),
        (2, "eval_start", 8, "ep1-ba9"),
    ],
)
def test_the_last_rank_is_told(
    tmp_path: Path, uninterrupted: Any, ranks: int, event: str, batch: int, expected: str
) -> None:
    """In a batch: all save after it. After it, or between batches: where all meet next. All exit with the code."""

    def rank_main(rank: int) -> None:
        with pytest.raises(Interrupted) as ended:
            make(tmp_path, SignalAt(batch, event, ranks - 1), policy={"every": None}).fit()
        assert ended.value.code == EXIT_CODE

    run_ranks(rank_main, ranks)
    assert hocket.Checkpoints(tmp_path).store.names() == [expected]
    assert differences(finish(tmp_path, ranks), uninterrupted(ranks)) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("duration", "batch", "expected"), [("2ep", 10, "ep2-ba10"), ("7ba", 7, "ep1-ba7")])
def test_told_in_the_last_evaluation(tmp_path: Path, ranks: int, duration: str, batch: int, expected: str) -> None:
    """At the end of an epoch, or of the fit only."""

    def rank_main(rank: int) -> None:
        told = SignalAt(batch, "eval_start", ranks - 1)
        with pytest.raises(Interrupted) as ended:
            make(tmp_path, told, duration=duration, policy={"every": None}).fit()
        assert ended.value.code == EXIT_CODE

    run_ranks(rank_main, ranks)
    assert hocket.Checkpoints(tmp_path).store.names() == [expected]


def test_the_exit_code_of_a_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=lambda: make(tmp_path, SignalAt(1, "batch_end"), strategy="single").fit()
    )
    process.start()
    process.join(60)
    assert process.exitcode == EXIT_CODE


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_being_written_is_written_to_its_end(asynchronous: bool) -> None:
    trainer = make("run", SignalAt(4, "batch_end"), policy={"asynchronous": asynchronous})
    with pytest.raises(Interrupted):
        trainer.fit()
    assert hocket.Checkpoints("run").store.latest() == "ep0-ba4"


def test_signals_at_once_are_one_and_another_one_later_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        make("once", Twice()).fit()
    assert hocket.Checkpoints("once").store.latest() == "ep0-ba3"
    monkeypatch.setattr(interruption, "_DUPLICATE", -1.0)
    with pytest.raises(KeyboardInterrupt, match="for the second time"):
        make("twice", Twice()).fit()
    assert hocket.Checkpoints("twice").store.latest() == "ep0-ba2"


def test_handlers_are_there_during_a_fit_only() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    trainer = make("run", SignalAt(2, "batch_end", number=signal.SIGINT), policy={"every": None})
    assert [signal.getsignal(number) for number in numbers] == before
    with pytest.raises(Interrupted) as ended:
        trainer.fit()
    assert ended.value.code == EXIT_CODE
    assert [signal.getsignal(number) for number in numbers] == before
