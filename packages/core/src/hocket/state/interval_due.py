"""Whether an interval in any unit is due, for plug-ins that act at one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.basics.time import Interval, Unit, interval_of

if TYPE_CHECKING:
    from hocket.state.state import State


class Due:
    """Call it once after each batch and each epoch of a fit: ``due(state)`` is whether the interval is due.

    It remembers the completed fraction of the duration between calls, which intervals in ``dur`` need.
    """

    def __init__(self, every: str | Interval | None) -> None:
        self._every = interval_of(every, "every")
        self._reached = self._every.due
        self._by_duration = self._every.every is not None and self._every.every.unit is Unit.DURATION
        self._elapsed = 0.0

    def fit_start(self, state: State) -> None:
        """Recompute the elapsed fraction, since the duration may have changed."""
        if self._by_duration:
            self._elapsed = state.elapsed()

    def __call__(self, state: State) -> bool:
        if not self._by_duration:
            return self._reached(state.previous, state.timestamp)
        due = self.peek(state)
        self._elapsed = state.elapsed()
        return due

    def peek(self, state: State) -> bool:
        """Whether the next call returns True."""
        if not self._by_duration:
            return self._reached(state.previous, state.timestamp)
        return self._reached(state.previous, state.timestamp, self._elapsed, state.elapsed())
