"""The suite for schedules of the learning rate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from hocket import Time, Timestamp
from hocket.basics.time import Unit
from hocket.schedules import Clock
from hocket_testkit.runs import RunConformance

_BATCHES = 40
#: Batches of the longest epoch that is tried for a schedule.
_LONGEST = 1024


class ScheduleConformance(RunConformance):
    """The tests that every schedule must pass. Define ``make``.

    Example:
        >>> import hocket
        >>> class TestCosine(hocket.testkit.ScheduleConformance):
        ...     def make(self):
        ...         return hocket.schedules.Cosine(warmup="2ba")
    """

    kind = "schedules"
    test_implements_known_hooks_only = None  # type: ignore[assignment]  # schedules are called, and have no hooks

    def make(self) -> Any:
        """Return a new schedule: it is called with a `hocket.schedules.Clock`, and returns the factor of the learning rates."""
        return super().make()

    def data(self) -> Any:
        """Return the batches of the reference again and again, until one epoch has room for the schedule."""
        return super().data() * (self._epoch() // 4)

    def _epoch(self) -> int:
        """Return the batches of an epoch: 4, or as many more as the schedule needs, such as for a warm-up of 10 batches."""
        batches = 4
        while batches < _LONGEST:
            try:
                self.make()(Clock(Timestamp(), Time(batches, Unit.BATCH), batches))
            except ValueError:  # too short, it says
                batches *= 2
            except (AttributeError, RuntimeError):
                break  # it needs more of a run than its clock
            else:
                return batches
        return 4

    def factors(self, schedule: Any) -> list[Any]:
        """Return the factors of a run of 40 batches, or more if an epoch has more, in epochs of 10."""
        total = max(_BATCHES, self._epoch())
        clocks = [
            Clock(
                Timestamp(epoch=batch // 10, batch=batch, batch_in_epoch=batch % 10, sample=8 * batch),
                Time(total, Unit.BATCH),
                10,
            )
            for batch in range(total)
        ]
        try:
            return [schedule(clock) for clock in clocks]
        except (AttributeError, RuntimeError) as error:
            if hasattr(schedule, "state_dict"):
                pytest.skip(f"it needs more of a run than its clock: {error}")
            raise

    def test_factors_are_numbers(self) -> None:
        """Each factor is a finite float of 0 or more, which costs no wait for a device."""
        for batch, factor in enumerate(self.factors(self.make())):
            assert isinstance(factor, int | float) and math.isfinite(factor) and factor >= 0, (
                f"The factor of batch {batch} is {factor!r}. Return a finite float of 0 or more, and no tensor."
            )

    def test_depends_on_the_time_only(self) -> None:
        """Without a state_dict, the factor of a batch is the same however often, and in which order, the schedule is called."""
        schedule = self.make()
        if hasattr(schedule, "state_dict"):
            return
        first, again, fresh = self.factors(schedule), self.factors(schedule), self.factors(self.make())
        assert first == again == fresh, (
            "The same batches have other factors when the schedule is called again. Compute them from clock.timestamp; a "
            "schedule that counts its calls starts again at 0 in a resumed run."
        )

    def test_copies_are_alike(self) -> None:
        """A copy gives the same factors, as optimizers with several groups and other processes need."""
        schedule = self.make()
        assert self.factors(copy.deepcopy(schedule)) == self.factors(schedule), "A deep copy gives other factors."

    def test_goes_on_when_training_is_extended(self) -> None:
        """Past the planned duration it still returns a factor, or says what it needs."""
        schedule = self.make()
        total = max(_BATCHES, self._epoch())
        clock = Clock(
            Timestamp(epoch=(total + 50) // 10, batch=total + 50, sample=8 * total + 400), Time(total, Unit.BATCH), 10
        )
        if not hasattr(schedule, "state_dict"):
            factor = schedule(clock)
            assert math.isfinite(factor) and factor >= 0, f"50 batches after the end the factor is {factor!r}."
