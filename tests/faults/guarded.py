"""Call a function in a child with limits of time and memory, and say what it printed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: What a command may take of a small file: seconds of a processor, and bytes beyond those of the process that it is forked
#: from; and the seconds after which it waits for something that does not come, on a machine that others use too.
SECONDS, BYTES, WAIT = 10.0, 500 << 20, 60.0


#: Bytes that a fork takes without doing anything.
_idle: list[int] = []


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: int
    output: str
    seconds: float
    bytes: int

    @property
    def fault(self) -> str:
        """What a command must not do to whoever opens a file of somebody else; empty if it did nothing of that."""
        if self.seconds > SECONDS:
            return f"it took {self.seconds:.1f} s"
        if self.bytes > BYTES:
            return f"it took {self.bytes >> 20} MiB"
        if "Traceback (most recent call last)" in self.output or self.code not in (0, 1, 2):
            return f"it ended with {self.code}"
        if "\x1b" in self.output or "\x9b" in self.output:
            return "it wrote to the terminal what controls it"
        return ""


def call(function: Callable[[], int | None], folder: Path) -> Ended:
    """Call a function in a fork, in a folder, and end that if it exceeds the limits."""
    if not _idle:
        _idle.append(0)
        _idle[0] = call(lambda: 0, folder).bytes
    output = folder / ".output"
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    if not (child := os.fork()):
        _run(function, folder, output)
    code = usage = None
    while code is None and time.monotonic() < began + WAIT:
        done, status, usage = os.wait4(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.002)
    if code is None:
        os.kill(child, signal.SIGABRT)  # its stack goes to the output
        time.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
    assert usage is not None
    seconds = usage.ru_utime + usage.ru_stime
    return Ended(code, output.read_text(errors="replace"), seconds, (usage.ru_maxrss << 10) - _idle[0])


def _run(function: Callable[[], int | None], folder: Path, output: Path) -> None:
    code = 70
    with contextlib.suppress(BaseException):
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.enable(sys.stderr)
        warnings.resetwarnings()  # those that pytest turns into errors
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS) + 2,) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + (2 << 30),) * 2)  # the machine survives
        try:
            code = function() or 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
