"""The progress of a run, and its planned length."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from hocket.basics.time import Time, Unit
from hocket.basics.timestamp import Timestamp
from hocket.errors import WrongValue
from hocket.help import warn


@dataclass(slots=True)
class Progress:
    """The counters of a run. The fit loop advances them; an exception leaves them as they are."""

    #: Batches that the loader returned; that are past batch_start; with which the optimizer stepped, or which were skipped;
    #: and that are past batch_checkpoint.
    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0
    #: Completed epochs, batches, samples, tokens and seconds; ``previous`` is one batch (or epoch) earlier.
    timestamp: Timestamp = field(default_factory=Timestamp, compare=False)  # has wall-clock seconds
    previous: Timestamp = field(default_factory=Timestamp, compare=False)
    #: The planned length of training, counted from its beginning; schedules and :meth:`elapsed` refer to it.
    max_duration: Time | None = None
    #: Requests to stop take effect after this long, counted from the beginning of training.
    min_duration: Time | None = None
    #: When the current fit ends, counted from the beginning of training, and the duration that it was given.
    fit_until: Time | None = None
    fit_asked: str | None = None
    #: Batches per epoch, or None while that is unknown.
    epoch_length: int | None = None
    #: Whether somebody was told that ``epoch_length`` is unknown.
    _warned: bool = field(default=False, compare=False)

    def elapsed(self) -> float:
        """Return the fraction of ``max_duration`` that is done, 0.0 to 1.0. It advances every batch, whatever the unit.

        Epochs advance by batch once the length of an epoch is known: from the loader, or after the first epoch. Warns once
        while it is unknown.
        """
        end = self.max_duration
        if end is not None and end.unit is Unit.EPOCH and not self.epoch_length and not self._warned:
            self._warned = True
            warn(
                f"The training data has no length, so the completed fraction of «duration='{end}'» stays at 0 until the first "
                "epoch ends, and with it whatever is given in 'dur'. Give the duration in batches, such as "
                "«duration='1000ba'», or define __len__ of the data set."
            )
        return self.displayed()

    def displayed(self) -> float:
        """Return :meth:`elapsed` without a warning, for those who only show it."""
        end = self.max_duration
        if end is None:
            raise WrongValue("There is no duration outside a fit. Pass «duration=» to the Trainer or to fit.")
        if not end.value:
            return 1.0
        now = self.timestamp
        if end.unit is Unit.EPOCH:
            done = float(now.epoch)
            if self.epoch_length:
                done += min(now.batch_in_epoch / self.epoch_length, 1.0)
        else:
            done = float(now.get(end.unit).value)
        return min(done / end.value, 1.0)

    def may_stop(self) -> bool:
        """Whether ``min_duration`` is over, so that requests to stop take effect."""
        least = self.min_duration
        if least is None:
            return True
        now = self.elapsed() if least.unit is Unit.DURATION else self.timestamp.count(least.unit)
        return now >= least.value

    def begin_batch_again(self) -> None:
        """Forget a batch that was begun and not completed; the data returns it again."""
        self.ready = self.started = self.processed

    def copy(self) -> Progress:
        """Return a copy that does not change as training continues."""
        taken = copy.copy(self)
        taken.timestamp, taken.previous = self.timestamp.copy(), self.previous.copy()
        return taken

    def state_dict(self) -> dict[str, int]:
        """Return the counters; timestamps and durations are saved separately."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Undo :meth:`state_dict`."""
        for name in _COUNTERS:
            setattr(self, name, saved[name])


_COUNTERS = ("ready", "started", "processed", "completed")
