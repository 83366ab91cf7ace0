"""Between a launcher and its workers: why a worker ended, written by itself into a file and read by the launcher."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

#: The variable that names the file. torch's elastic agent sets it, and reads the same file.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: The variable with the file descriptor of a pipe that nobody writes to: it ends with the process that has the other end.
PIPE = "HOCKET_LAUNCHER_PIPE"


class WorkerError(RuntimeError):
    """A worker process raised or was killed; the message has its traceback. ``rank`` is which."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a worker with an exit code other than 0; -9 for one that signal 9 killed."""

    rank: int
    exit_code: int
    #: Empty where the worker left no word.
    traceback: str = ""
    #: When it was written, in seconds since 1970; infinity if it was not.
    time: float = float("inf")

    def __str__(self) -> str:
        if self.traceback:
            return f"Rank {self.rank} raised (exit code {self.exit_code}):\n\n{self.traceback.rstrip()}"
        if self.exit_code >= 0:
            return f"Rank {self.rank} ended with exit code {self.exit_code} and left no traceback."
        number = -self.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        why = {
            "SIGKILL": " That is what a machine does that is out of memory: see dmesg or the job's limits.",
            "SIGSEGV": " A library crashed: set PYTHONFAULTHANDLER=1 to see where.",
            "SIGABRT": " A library gave up; what it said stands above.",
        }.get(name, "")
        return f"Rank {self.rank} was killed by {name}.{why}"

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would show: 128 and the signal's number for a process that was killed."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def write_error(error: BaseException, code: int = 1) -> None:
    """Write ``error`` and the exit code that it leads to into the file that the launcher named, in the form that torch's agent
    reads; nothing if it named none."""
    name = os.environ.get(ERROR_FILE)
    if not name:
        return
    now = time.time()
    lines = traceback.format_exception(error)
    what = {"py_callstack": "".join(lines), "timestamp": str(int(now)), "time": now}
    report = {"message": {"message": lines[-1].strip(), "errorCode": code, "extraInfo": what}}
    part = Path(f"{name}.part")
    part.write_text(json.dumps(report))
    os.replace(part, name)


def read_failure(rank: int, exit_code: int, file: str | os.PathLike[str]) -> Failure:
    """What the worker left in the file, or a failure without traceback."""
    try:
        report = json.loads(Path(file).read_text())["message"]["extraInfo"]
        text = _without_launcher(report["py_callstack"])
        return Failure(rank, exit_code, text, float(report.get("time", report["timestamp"])))
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that somebody else wrote otherwise
        return Failure(rank, exit_code)


def exit_code(file: str | os.PathLike[str]) -> int | None:
    """The exit code that the worker said it would end with, or None if it left no word."""
    try:
        return int(json.loads(Path(file).read_text())["message"]["errorCode"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first(failures: list[Failure]) -> Failure:
    """The one that the others followed from.

    A worker that was killed by a signal, but for SIGTERM, which launchers send to end the rest, cannot have followed from an
    exception elsewhere within the moment in which they are looked at. Otherwise the earliest.
    """

    def order(failure: Failure) -> tuple[bool, float, int]:
        ended = failure.exit_code == -signal.SIGTERM
        killed = failure.exit_code < 0 and not ended and not failure.traceback
        return (ended, 0.0 if killed else failure.time, failure.rank)

    return min(failures, key=order)


def _without_launcher(text: str) -> str:
    """A traceback without the frames that lead from `hocket.launching.worker` to the script."""
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for line in lines:
        if line.startswith('  File "'):
            skipping = "<frozen runpy>" in line or f"{os.sep}hocket{os.sep}launching{os.sep}worker.py" in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)
