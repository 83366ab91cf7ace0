"""One training run, measured in a forked process of its own with one thread, and pairs of them.

Plain runs and those with rows' settings follow one another in turns, so that a machine that slows down slows down
both. Needs an operating system with fork, such as Linux.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

import hocket
from evidence.tasks import Part, Task

_FORK = multiprocessing.get_context("fork")


class Clock(hocket.Callback):
    """Seconds of ``fit`` and quality at each evaluation, and seconds of each step.

    All of ``fit`` counts, from surgery to the computation of averaged statistics, but for the evaluation itself.
    """

    def __init__(self) -> None:
        self.curve: list[tuple[int, float, float]] = []
        self.steps: list[float] = []
        self._start = self._paused = time.perf_counter()

    def start(self) -> None:
        """Begin to count."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start

    def batch_end(self, state: hocket.State) -> None:
        """Keep the seconds of this step."""
        self.steps.append(state.timestamp.batch_seconds)

    def eval_start(self, state: hocket.State) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def eval_end(self, state: hocket.State) -> None:
        """Let it go on, and keep the quality."""
        self._start += time.perf_counter() - self._paused
        self.curve.append((state.timestamp.batch, self.seconds(), state.metrics["held-out/quality"]))


def make_trainer(
    task: Task,
    arguments: Mapping[str, Any],
    seed: int,
    part: Part,
    model: Mapping[str, Any] | None = None,
    folder: str = "runs",
    clock: Clock | None = None,
) -> hocket.Trainer:
    """A Trainer of a task with `rows.trainer_arguments`, evaluated on a held-out part."""
    others = dict(arguments)
    batch_size = others.pop("batch_size")
    torch.manual_seed(seed)
    return hocket.Trainer(
        **{
            "model": task.model(**(model or {})),
            "loss": "cross_entropy",
            "train_data": task.loader("train", batch_size, seed),
            "eval_data": {"held-out": task.loader(part, batch_size, seed)},
            "metrics": {"quality": task.quality},
            "callbacks": [clock] if clock else [],
            "eval_every": f"{1 / task.evaluations}dur",
            "device": "cpu",
            "strategy": "single",
            "seed": seed,
            "folder": folder,
            **others,
        }
    )


def prepare(tasks: Iterable[Task]) -> None:
    """Load data and import what runs import, once for the processes forked afterwards. Trains nothing."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # torch's optimizers import it in their first step, which takes seconds
    for task in tasks:
        make_trainer(task, {**task.baseline, "duration": "1ba"}, 0, "test").close()


def run(
    task: Task, arguments: Mapping[str, Any], seed: int, part: Part, model: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train once, and return quality, curve, seconds, steps, median µs per step, peak MiB and what was warned about."""
    torch.set_num_threads(1)
    clock = Clock()
    before = _resident()
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", hocket.NoEffectWarning)
        with make_trainer(task, arguments, seed, part, model, folder, clock) as trainer:
            clock.start()
            trainer.fit()
            seconds = clock.seconds()
    quality = clock.curve[-1][2]
    if not math.isfinite(quality):
        raise ValueError(f"the quality is {quality} after training")
    return {
        "quality": quality,
        "curve": clock.curve,
        "seconds": seconds,
        "steps": len(clock.steps),
        "step_us": statistics.median(clock.steps) * 1e6,
        "peak_mib": _peak() - before,
        "warned": [str(warning.message) for warning in caught],
    }


def _resident() -> float:
    """MiB of memory in use, where /proc tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return 0.0


def _peak() -> float:
    """The most MiB that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def apart(function: Callable[[], Any], timeout: float = 600) -> dict[str, Any]:
    """What a function returns in a forked process, or ``{"error": …}``."""
    process, end = _start(function)
    with end:
        if end.poll(timeout):
            answer = _received(end)
        else:
            process.kill()
            answer = {"error": f"took more than {timeout:.0f} s"}
    process.join()
    return answer


def _start(function: Callable[[], Any]) -> tuple[Any, connection.Connection]:
    ours, theirs = _FORK.Pipe(duplex=False)

    def answer() -> None:
        try:
            theirs.send(function())
        except BaseException as error:
            theirs.send({"error": f"{type(error).__name__}: {error}"})

    process = _FORK.Process(target=answer)
    process.start()
    theirs.close()
    return process, ours


def _received(end: connection.Connection) -> dict[str, Any]:
    try:
        return end.recv()  # type: ignore[no-any-return]
    except EOFError:
        return {"error": "the process ended without an answer"}


def in_turns(runs: Mapping[str, Callable[[], dict[str, Any]]], backwards: bool) -> dict[str, Any]:
    """The runs by name, one after the other, each in a process of its own."""
    names = list(runs)
    return {name: apart(runs[name]) for name in (reversed(names) if backwards else names)}


def side_by_side(jobs: Iterable[tuple[Any, Callable[[], Any]]], workers: int) -> Iterator[tuple[Any, Any]]:
    """Each job's key and answer as it finishes, with this many processes at a time."""
    waiting, running = iter(jobs), {}
    while True:
        while len(running) < workers and (job := next(waiting, None)):
            process, end = _start(job[1])
            running[end] = job[0], process
        if not running:
            return
        for end in connection.wait(list(running)):
            key, process = running.pop(end)  # type: ignore[call-overload]
            answer = _received(end)  # type: ignore[arg-type]
            process.join()
            yield key, answer
