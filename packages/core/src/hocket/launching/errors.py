"""Failures of workers: a worker writes its error to a file, and the launcher reads it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

#: The environment variable that names the file. torch's elastic agent sets it, and reads the same file.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: The environment variable with the file descriptor of a pipe without data: it closes when the launcher ends.
PIPE = "HOCKET_LAUNCHER_PIPE"


class WorkerError(RuntimeError):
    """A worker process raised or was killed. The message has its traceback, and ``rank`` is its rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended with a non-zero exit code; -9 stands for signal 9."""

    rank: int
    exit_code: int
    #: Empty if the worker wrote no error file.
    traceback: str = ""
    #: When the worker wrote it, in seconds since 1970; infinity if it did not.
    time: float = float("inf")

    def __str__(self) -> str:
        if self.traceback:
            return f"Rank {self.rank} raised (exit code {self.exit_code}):\n\n{self.traceback.rstrip()}"
        if self.exit_code >= 0:
            return f"Rank {self.rank} ended with exit code {self.exit_code} and left no traceback."
        number = -self.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        why = {
            "SIGKILL": " The usual cause is that the machine ran out of memory: see dmesg or the job's limits.",
            "SIGSEGV": " A library crashed: set PYTHONFAULTHANDLER=1 to see where.",
            "SIGABRT": " A library aborted; see its message above.",
        }.get(name, "")
        return f"Rank {self.rank} was killed by {name}.{why}"

    @property
    def shell_code(self) -> int:
        """The exit code in a shell: 128 plus the signal's number for a killed process."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def write_error(error: BaseException, code: int = 1) -> None:
    """Write ``error`` and its exit code to the launcher's error file (if any), in the format of torch's agent."""
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
    """Read a worker's failure from its error file; without a readable file, return a failure without traceback."""
    try:
        report = json.loads(Path(file).read_text())["message"]["extraInfo"]
        text = _without_launcher(report["py_callstack"])
        return Failure(rank, exit_code, text, float(report.get("time", report["timestamp"])))
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one in another format
        return Failure(rank, exit_code)


def exit_code(file: str | os.PathLike[str]) -> int | None:
    """Return the exit code that the worker recorded, or None if it wrote no error file."""
    try:
        return int(json.loads(Path(file).read_text())["message"]["errorCode"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others.

    A worker killed by a signal other than SIGTERM comes first: an exception in another worker cannot have caused that in so
    short a time. SIGTERM comes last, because launchers send it to terminate the other workers. Otherwise take the earliest.
    """

    def order(failure: Failure) -> tuple[bool, float, int]:
        ended = failure.exit_code == -signal.SIGTERM
        killed = failure.exit_code < 0 and not ended and not failure.traceback
        return (ended, 0.0 if killed else failure.time, failure.rank)

    return min(failures, key=order)


def _without_launcher(text: str) -> str:
    """Return the traceback without the frames between `hocket.launching.worker` and the script."""
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for line in lines:
        if line.startswith('  File "'):
            skipping = "<frozen runpy>" in line or f"{os.sep}hocket{os.sep}launching{os.sep}worker.py" in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)
