"""Defer Control-C until the end of the current batch, from where a fit can be continued exactly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds within which signals count as one: clusters signal all processes, and launchers forward the signal to their ranks.
_DUPLICATE = 1.0
#: The exit code of a run that saved and ended because of a signal: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_CODE = 75


class Deferred(KeyboardInterrupt):
    """Control-C ended a fit after a batch, where the next fit continues."""


class Interrupted(SystemExit):
    """A signal ended a run, which has written a checkpoint or, with ``on_error="warn"``, warned why it could not.

    Uncaught, the process exits with `EXIT_CODE`.
    """


class Interruption:
    """Record a signal. Another, a second or more later, raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self._received_at: float | None = None
        #: The signal.
        self.number: int | None = None

    @property
    def received(self) -> bool:
        """Whether this process has received a signal."""
        return self._received_at is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        now = time.monotonic()
        if self._received_at is not None and now - self._received_at > _DUPLICATE:
            self.forget()
            raise KeyboardInterrupt(f"signal {number}, for the second time")
        if self._received_at is None:
            self._received_at, self.number = now, number

    def forget(self) -> None:
        """Clear the signal."""
        self._received_at = self.number = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if Control-C was pressed."""
        if self.received:
            self.forget()
            raise Deferred("Control-C: the current batch was completed, and fit() continues after it")


@contextmanager
def deferred(alone: bool) -> Iterator[Interruption]:
    """Defer Control-C until the next :meth:`Interruption.check`, or the end of the block.

    Does nothing if the program handles SIGINT itself, outside the main thread, or with several ranks, which would stop at
    different batches.
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
    handler = interruption.handle
    signal.signal(signal.SIGINT, handler)
    try:
        yield interruption
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, default)
    interruption.check()
