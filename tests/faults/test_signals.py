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
from hocket.basics import control_c
from hocket_checkpoints.signals import EXIT_CODE, Interrupted
from hocket_checkpoints.slurm import requeue
from hocket_testkit import run_ranks


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

LAUNCH = ("-c", "import sys; from hocket_cli import main; sys.exit(main())", "launch", "-n", "2")


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "event", "batch", "expected"),
    [
        pytest.param(1, "batch_start", 7, "ep1-ba8", marks=pytest.mark.long),
        (2, "batch_start", 7, "ep1-ba8"),
        pytest.param(2, "batch_end", 7, "ep1-ba7", marks=pytest.mark.long),
        pytest.param(2, "epoch_end", 10, "ep2-ba10", marks=pytest.mark.long),
        pytest.param(2, "eval_start", 8, "ep1-ba9", marks=pytest.mark.long),
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


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
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
    monkeypatch.setattr(control_c, "_DUPLICATE", -1.0)
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


# --- the program's own handlers, and SLURM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_handler_of_the_program_is_called_too(tmp_path: Path, number: int) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    handler = signal.getsignal(number)
    try:
        with pytest.raises(Interrupted):
            make(tmp_path, SignalAt(3, "batch_start", number=number), strategy="single", policy={"every": None}).fit()
        assert heard == [number]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert hocket.Checkpoints(tmp_path).store.names() == ["ep0-ba4"]


def test_control_c_in_an_evaluation_still_writes_the_checkpoint_first(tmp_path: Path) -> None:
    """The Trainer's own handler of Control-C, which would interrupt between two batches of the evaluation, is not called."""
    told = SignalAt(4, "eval_batch_start", number=signal.SIGINT)
    with pytest.raises(Interrupted):
        make(tmp_path, told, strategy="single", policy={"every": None}).fit()
    assert len(hocket.Checkpoints(tmp_path).store.names()) == 1


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A SLURM job with a scontrol that records how it was called; returns the calls."""
    calls, command = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nls {tmp_path / "run"} >> {calls}\nexit ${{SCONTROL_EXIT:-0}}\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return lambda: calls.read_text().split("\n")[:-1] if calls.exists() else []


def interrupted(folder: Path, number: int, ranks: int = 1, rank: int = 0, **options: Any) -> None:
    def rank_main(_: int = 0) -> None:
        told = SignalAt(4, "batch_end", rank, number)
        with pytest.raises(Interrupted) as ended:
            make(folder / "run", told, policy={"every": None, "requeue": True}, resume="auto", **options).fit()
        assert ended.value.code == EXIT_CODE

    if ranks == 1:
        rank_main()
    else:
        run_ranks(rank_main, ranks)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_job_is_requeued_once_the_checkpoint_is_written(
    tmp_path: Path, slurm: Any, number: int, ranks: int
) -> None:
    """Whichever rank was told, rank 0 asks for it, once."""
    options = {"strategy": "single"} if ranks == 1 else {}
    interrupted(tmp_path, number, ranks, ranks - 1, **options)
    assert slurm() == ["requeue 4711", "ep0-ba4", "latest"]


def test_a_task_of_an_array_is_requeued_and_not_the_array(
    tmp_path: Path, slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    interrupted(tmp_path, signal.SIGUSR1, strategy="single")
    assert slurm()[0] == "requeue 4711_3"


def test_control_c_does_not_requeue(tmp_path: Path, slurm: Any) -> None:
    interrupted(tmp_path, signal.SIGINT, strategy="single")
    assert slurm() == []


def test_a_job_that_cannot_be_requeued_says_so(tmp_path: Path, slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONTROL_EXIT", "3")
    with pytest.warns(RuntimeWarning, match=r"scontrol requeue 4711: exit code 3.*The checkpoint is complete"):
        interrupted(tmp_path, signal.SIGUSR1, strategy="single")
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RuntimeWarning, match="No such file or directory: 'scontrol'"):
        requeue("4711")


def test_requeue_is_asked_for_and_needs_resume(tmp_path: Path, slurm: Any) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path / "run", SignalAt(4, "batch_end"), strategy="single", policy={"every": None}).fit()
    assert slurm() == []
    with pytest.raises(ValueError, match=r"resume=None would not continue.*resume='auto'"):
        make(tmp_path / "other", strategy="single", policy={"requeue": True}, resume=None)


def test_outside_of_slurm_requeue_changes_nothing(tmp_path: Path, slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    interrupted(tmp_path, signal.SIGTERM, strategy="single")
    assert slurm() == []
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
