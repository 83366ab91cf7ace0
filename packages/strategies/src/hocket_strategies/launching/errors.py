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
#: Seconds within which a launcher notices that a signal has killed a worker. torch's agent itself sends SIGKILL after 30 s.
_NOTICED, _NOTICED_SIGKILL = 2.0, 25.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended with a non-zero exit code; -9 stands for signal 9."""

    rank: int
    exit_code: int
    #: Empty if the worker wrote no error file.
    traceback: str = ""
    #: When the worker wrote it, or else when the launcher noticed its end, in seconds since 1970.
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


def read_failure(rank: int, exit_code: int, file: str | os.PathLike[str], noticed: float | None = None) -> Failure:
    """Read a worker's failure from its error file. Without a readable file, return one without traceback that is noticed now.

    ``noticed``: when the end was noticed instead, in seconds since 1970.
    """
    try:
        report = json.loads(Path(file).read_text())["message"]["extraInfo"]
        text = _without_launcher(report["py_callstack"])
        return Failure(rank, exit_code, text, float(report.get("time", report["timestamp"])))
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one in another format
        return Failure(rank, exit_code, time=time.time() if noticed is None else noticed)


def exit_code(file: str | os.PathLike[str]) -> int | None:
    """Return the exit code that the worker recorded, or None if it wrote no error file."""
    try:
        return int(json.loads(Path(file).read_text())["message"]["errorCode"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others.

    It is the earliest. A worker that a signal killed may be noticed a moment after the exceptions of workers that waited for
    it. One noticed later than that died because the launcher ended it. SIGTERM comes last: launchers send it to terminate the
    other workers.
    """

    def order(failure: Failure) -> tuple[bool, float, int]:
        ended = failure.exit_code == -signal.SIGTERM
        killed = failure.exit_code < 0 and not ended and not failure.traceback
        late = _NOTICED_SIGKILL if failure.exit_code == -signal.SIGKILL else _NOTICED
        return (ended, failure.time - (late if killed else 0.0), failure.rank)

    return min(failures, key=order)


def _without_launcher(text: str) -> str:
    """Return the traceback without the frames between `hocket_strategies.launching.worker` and the script."""
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for line in lines:
        if line.startswith('  File "'):
            skipping = (
                "<frozen runpy>" in line or f"{os.sep}hocket_strategies{os.sep}launching{os.sep}worker.py" in line
            )
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)
