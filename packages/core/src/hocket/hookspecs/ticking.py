"""A thread that calls a function regularly, for monitors and loggers that act without the training loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from hocket.errors import WrongValue
from hocket.help import warn


class Ticking:
    """Call a function every so many seconds in a daemon thread, from :meth:`start` to :meth:`stop`.

    A forked process has no such thread until it calls :meth:`start`. An exception ends the calls with a warning.

    Args:
        seconds: the pause between two calls.
        call: the function; :meth:`start` calls it at once, in the caller's thread, so that it never runs twice at a time.
        who: the plug-in, for the warning and the name of the thread.
    """

    def __init__(self, seconds: float, call: Callable[[], None], who: str) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise WrongValue(
                f"{who} was given {seconds!r} as its seconds between samples; give a number above 0, such as 5."
            )
        self._seconds, self._call, self._who = seconds, call, who
        self._thread: threading.Thread | None = None
        self._ending: threading.Event | None = None  # made when needed, because it cannot be pickled
        self._process = 0

    def start(self) -> bool:
        """Call the function, and start the thread unless it runs. Return whether it runs: not after an exception."""
        if self._thread is not None and self._process == os.getpid():
            return True
        if not self._tick():
            return False
        self._process, self._ending = os.getpid(), (ending := threading.Event())
        self._thread = threading.Thread(target=self._run, args=(ending,), name=f"hocket {self._who}", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """End the thread, after the current call. May be called twice."""
        thread, ending = self._thread, self._ending
        self._thread = self._ending = None
        if thread is not None and ending is not None and self._process == os.getpid():
            ending.set()
            thread.join(timeout=10.0)

    def _run(self, ending: threading.Event) -> None:
        while not ending.wait(self._seconds) and self._tick():
            pass

    def _tick(self) -> bool:
        try:
            self._call()
        except Exception as error:
            warn(f"{self._who} stopped: {type(error).__name__}: {error}. Training continues without it.")
            return False
        return True
