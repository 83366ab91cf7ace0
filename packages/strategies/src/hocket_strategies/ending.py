"""Gloo's threads come to rest before python ends.

They drop the tensors of a collective some time after it is over. If python has begun to end by then, the thread is ended where
it waits for the interpreter, which aborts the process, after all its work was done: "terminate called without an active
exception" (pytorch#190489, torch 2.9 to 2.15).
"""

from __future__ import annotations

import atexit
import os
import time
from functools import cache
from pathlib import Path

#: How often in a row nothing is seen to run. What waits for the interpreter gets it during the pauses.
_LOOKS, _PAUSE = 3, 0.001


@cache
def wait_at_exit() -> None:
    """Have the end of this process wait for its threads, for a second at most."""
    atexit.register(come_to_rest)


def come_to_rest(seconds: float = 1.0) -> None:
    """Return when no other thread of this process wants to run, or after ``seconds``. Only Linux says what threads do."""
    deadline, quiet = time.monotonic() + seconds, 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        quiet = 0 if _running() else quiet + 1


def _running() -> bool:
    for thread in Path("/proc/self/task").glob("*"):
        if thread.name != str(os.getpid()):
            try:
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended
                continue
            if state in "RD":  # it runs, wants to, or waits for a disk
                return True
    return False
