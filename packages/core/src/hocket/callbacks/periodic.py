"""The base class of callbacks that report at an interval."""

from __future__ import annotations

from hocket.callback import Callback
from hocket.state import State
from hocket.time import Interval, Unit


class Periodic(Callback):
    """Call :meth:`_report` when an interval is due: at the end of a batch, or of an epoch for intervals in epochs.

    Args:
        every: an interval in any unit, including fractions of the duration.
    """

    def __init__(self, every: str) -> None:
        self._every = Interval(every)
        self._of_duration = self._every.every is not None and self._every.every.unit is Unit.DURATION
        self._elapsed = 0.0

    def _report(self, state: State) -> None:
        raise NotImplementedError

    def fit_start(self, state: State) -> None:
        """Recompute the elapsed fraction, since the duration may have changed."""
        if self._of_duration:
            self._elapsed = state.elapsed()

    def batch_end(self, state: State) -> None:
        """Report if the interval is due."""
        if not self._of_duration:
            due = self._every.due(state.previous, state.timestamp)
        else:
            before, self._elapsed = self._elapsed, state.elapsed()
            due = self._every.due(state.previous, state.timestamp, before, self._elapsed)
        if due:
            self._report(state)

    def epoch_end(self, state: State) -> None:
        """Report if the interval is due."""
        Periodic.batch_end(self, state)  # not the override of a subclass, which may do more
