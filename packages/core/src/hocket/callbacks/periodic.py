"""What the callbacks that do something every so often share."""

from __future__ import annotations

from hocket.callback import Callback
from hocket.state import State
from hocket.time import Interval, Unit


class Periodic(Callback):
    """Calls :meth:`_report` when an interval is due: at the end of a batch, or of an epoch for intervals in epochs.

    Args:
        every: an interval in any unit, shares of the duration included.
    """

    def __init__(self, every: str) -> None:
        self._every = Interval(every)
        self._in_shares = self._every.every is not None and self._every.every.unit is Unit.DURATION
        self._share = 0.0

    def _report(self, state: State) -> None:
        raise NotImplementedError

    def fit_start(self, state: State) -> None:
        """The duration may be another one now."""
        if self._in_shares:
            self._share = state.elapsed()

    def batch_end(self, state: State) -> None:
        """Reports, when it is due."""
        if not self._in_shares:
            due = self._every.due(state.previous, state.timestamp)
        else:
            before, self._share = self._share, state.elapsed()
            due = self._every.due(state.previous, state.timestamp, before, self._share)
        if due:
            self._report(state)

    def epoch_end(self, state: State) -> None:
        """Reports, when it is due."""
        Periodic.batch_end(self, state)  # not what subclasses do at the end of a batch besides
