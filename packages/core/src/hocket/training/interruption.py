"""Control-C, acted upon between batches, where a fit can be continued exactly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds in which two signals are one: launchers pass on to a process what a terminal has sent it already.
_ONE = 1.0


class Interruption:
    """Whether Control-C was pressed. The second one, a second or more after the first, interrupts at once."""

    def __init__(self) -> None:
        self._told: float | None = None

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        now = time.monotonic()
        if self._told is not None and now - self._told > _ONE:
            self._told = None
            raise KeyboardInterrupt
        self._told = self._told or now

    def check(self) -> None:
        """Raise KeyboardInterrupt here, if Control-C was pressed before."""
        if self._told is not None:
            self._told = None
            raise KeyboardInterrupt("Control-C: the batch in progress was completed, and fit() continues after it")


@contextmanager
def deferred(alone: bool) -> Iterator[Interruption]:
    """Let Control-C wait for the next :meth:`Interruption.check`, or the end.

    Not where the program handles SIGINT itself, outside the main thread, and with several ranks, which would stop at different
    batches.
    """
    interruption = Interruption()
    default = signal.default_int_handler
    if (
        not alone
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not default
    ):
        yield interruption
        return
    tell = interruption.tell
    signal.signal(signal.SIGINT, tell)
    try:
        yield interruption
    finally:
        if signal.getsignal(signal.SIGINT) is tell:
            signal.signal(signal.SIGINT, default)
    interruption.check()
