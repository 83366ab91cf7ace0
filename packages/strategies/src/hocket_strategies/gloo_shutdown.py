"""Wait for Gloo's threads before Python exits.

They free the tensors of a collective some time after it has completed. If Python is already exiting, the thread is terminated
while it waits for the interpreter, and the process aborts although its work is done: "terminate called without an active
exception" (pytorch#190489, torch 2.9 to 2.15).
"""

from __future__ import annotations

import atexit
import os
import time
from functools import cache
from pathlib import Path

#: Idle observations in a row, and seconds between them. Threads that wait for the interpreter get it during the pauses.
_LOOKS, _PAUSE = 3, 0.001


@cache
def wait_at_exit() -> None:
    """Make this process wait for its threads at exit, for at most a second."""
    atexit.register(wait_for_threads)


def wait_for_threads(seconds: float = 1.0) -> None:
    """Return when no other thread of this process is runnable, or after ``seconds``. Thread states are known on Linux only."""
    deadline, quiet = time.monotonic() + seconds, 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        quiet = 0 if _running() else quiet + 1


def _running() -> bool:
    for thread in Path("/proc/self/task").glob("*"):
        if thread.name != str(os.getpid()):
            try:
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # the thread has ended
                continue
            if state in "RD":  # running, runnable, or waiting for a disk
                return True
    return False
