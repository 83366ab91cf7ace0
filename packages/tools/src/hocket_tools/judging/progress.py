"""A line on a terminal with what is done and the time that is left."""

from __future__ import annotations

import sys
import time


class Progress:
    """Show progress in one line of stderr if that is a terminal, at most ten times a second. Close it at the end.

    Args:
        what: what is counted.
        total: the number of steps; None if it is not known.
        shown: whether this process shows anything, such as rank 0.
    """

    def __init__(self, what: str, total: int | None, shown: bool = True) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = shown and sys.stderr.isatty()
        self._began, self._drawn = time.monotonic(), 0.0

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        now = time.monotonic()
        if not self._shown or now - self._drawn < 0.1:
            return
        self._drawn = now
        text = f"{self._what} {self._done:,}"
        if self._total:
            left = int((now - self._began) / self._done * max(self._total - self._done, 0))
            text += f" of {self._total:,}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
