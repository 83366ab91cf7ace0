"""The base class of callbacks that report at an interval."""

from __future__ import annotations

from hocket.basics.time import Unit, interval_of
from hocket.hookspecs.callback import Callback
from hocket.state.interval_due import Due
from hocket.state.state import State


class Periodic(Callback):
    """Call :meth:`_report` when an interval is due: at the end of a batch, or of an epoch for intervals in epochs.

    The end of a fit reports the batches since then, so that a fit shorter than the interval is reported too.

    Args:
        every: an interval in any unit, including fractions of the duration.
    """

    def __init__(self, every: str) -> None:
        interval = interval_of(every, "every", optional=False)
        self._due = Due(interval)
        self._reported_at = 0  # the batch after which the latest report was made, or the fit began
        time = interval.every
        if time is not None and time.unit is Unit.BATCH and not self._in_every_batch():
            self.every_batches = {"batch_end": int(time.value)}

    def _in_every_batch(self) -> bool:
        """Whether `batch_end` has something to do in batches without a report."""
        return type(self).batch_end is not Periodic.batch_end

    def _report(self, state: State) -> None:
        raise NotImplementedError

    def fit_start(self, state: State) -> None:
        """Begin to watch the interval."""
        self._due.fit_start(state)
        self._reported_at = state.timestamp.batch

    def batch_end(self, state: State) -> None:
        """Report if the interval is due."""
        if self._due(state):
            self._reported_at = state.timestamp.batch
            self._report(state)

    def epoch_end(self, state: State) -> None:
        """Report if the interval is due."""
        Periodic.batch_end(self, state)  # not the override of a subclass, which may do more

    def fit_end(self, state: State) -> None:
        """Report what remains."""
        if self._reported_at != state.timestamp.batch:
            self._reported_at = state.timestamp.batch
            self._report(state)
