"""Handle SIGTERM and SIGINT (Control-C) during a fit: the run writes a checkpoint at the next opportunity, and ends."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from hocket.training.interruption import Deferred

#: The exit code of a run that saved and ended because of a signal: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds within which signals count as one: a cluster signals all processes, and a launcher forwards the signal to its ranks.
_DUPLICATE = 1.0


class Interrupted(SystemExit):
    """A signal ended a run, which has written a checkpoint or, with ``on_error="warn"``, warned why it could not.

    Uncaught, the process exits with `EXIT_CODE`.
    """


class Signals:
    """Record the first signal; another, a second or more later, raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._number: int | None = None
        self._replaced: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        """Whether this process has received a signal."""
        return self._first is not None

    def listen(self) -> None:
        """Replace the signal handlers. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._receive) for number in _SIGNALS}

    def stop(self) -> None:
        """Restore the signal handlers."""
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)

    def end(self, alone: bool) -> BaseException:
        """Clear the signal, and return the exception that ends the run.

        That is a KeyboardInterrupt for Control-C in a notebook or at a Python prompt, which exiting would end, unless there are
        other ranks, which have to end too.
        """
        control_c = self._number == signal.SIGINT and alone and hasattr(sys, "ps1")
        self._first = self._number = None
        return Deferred("Control-C: a checkpoint was written") if control_c else Interrupted(EXIT_CODE)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > _DUPLICATE:
            self._first = None
            raise KeyboardInterrupt(f"signal {number}, for the second time")
        if self._first is None:
            self._first, self._number = now, number
