"""A line on a terminal with what is done and the time that is left."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Shows progress in one line of stderr if that is a terminal, at most ten times a second; a context manager."""

    def __init__(self, visible: bool = True) -> None:
        self._visible = visible and sys.stderr.isatty()
        self._what, self._total, self._done, self._began, self._drawn = "", 0, 0, 0.0, 0.0

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Begin something that has ``total`` steps, of which some are done already."""
        self._what, self._total, self._done = what, total, done
        self._began, self._before = time.monotonic(), done
        self._draw(True)

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        self._draw(self._done == self._total)

    def _draw(self, certainly: bool) -> None:
        now = time.monotonic()
        if not self._visible or (now - self._drawn < 0.1 and not certainly):
            return
        self._drawn = now
        text = f"{self._what} {self._done:,} of {self._total:,}"
        if self._done > self._before:
            left = (now - self._began) / (self._done - self._before) * (self._total - self._done)
            text += f", {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
