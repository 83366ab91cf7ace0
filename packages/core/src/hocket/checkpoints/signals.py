"""SIGTERM and SIGINT (Control-C) during a fit: the run writes a checkpoint at the next opportunity, and ends."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

#: The exit code of a run that was told to end and has saved before: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds in which signals are one: a cluster signals all processes, and a launcher among them passes that on to its ranks.
_ONE = 1.0


class Interrupted(SystemExit):
    """A run was told to end by a signal, and has written a checkpoint or, with ``on_error="warn"``, said why not.

    Uncaught, the process exits with `EXIT_CODE`.
    """


class Signals:
    """Remembers the first signal; another, a second or more later, raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._replaced: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        """Whether this process was told to end."""
        return self._first is not None

    def listen(self) -> None:
        """Replace the handlers, in the main thread; in others there is nothing to listen to."""
        if threading.current_thread() is threading.main_thread():
            self._replaced = {number: signal.signal(number, self._receive) for number in _SIGNALS}

    def stop(self) -> None:
        """Put the handlers back."""
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)

    def forget(self) -> None:
        """Forget the signal: the run ends now."""
        self._first = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > _ONE:
            self._first = None
            raise KeyboardInterrupt(f"signal {number}, for the second time")
        self._first = self._first or now
