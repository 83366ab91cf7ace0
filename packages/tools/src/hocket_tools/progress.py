"""Lines for people, on stderr: decisions that nobody asked for, and what is done and the time that is left."""

from __future__ import annotations

import sys
import time


def say(text: str, rank: int = 0) -> None:
    """Say on rank 0, in one line of stderr, what a command or a plug-in has decided by itself."""
    if rank == 0:
        print(f"hocket: {text}", file=sys.stderr, flush=True)


class Progress:
    """Show progress in one line of stderr if that is a terminal, at most ten times a second; the line is cleared on exit.

    Args:
        shown: whether this process shows anything, such as rank 0.
    """

    def __init__(self, shown: bool = True) -> None:
        self._visible = shown and sys.stderr.isatty()
        self._what, self._done, self._began, self._drawn = "", 0, 0.0, 0.0

    def step(self, what: str, total: int | None) -> None:
        """Count one more step."""
        self.show(what, self._done + 1 if what == self._what else 1, total)

    def show(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Show how many steps are done, if they are counted, of how many, if that is known, and when the last will be."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._drawn = what, now, 0.0
        self._done = done
        if not self._visible or now - self._drawn < 0.1:
            return
        self._drawn = now
        text = f"{what} {done:,}" if done else f"{what} …"
        if done and total:
            text += f" of {total:,}"
            left = int((now - self._began) / done * max(total - done, 0))
            text += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left" if not what.endswith(" of") else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
