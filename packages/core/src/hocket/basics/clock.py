"""What every schedule has: its input, the position and duration of a run, and its base class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hocket.basics.time import Time, TimeError, Unit
from hocket.basics.timestamp import Timestamp
from hocket.errors import Unsupported


@dataclass(slots=True)
class Clock:
    """The input of a schedule: the position and duration of the run, and the number of batches per epoch (None: unknown).

    Times can be compared if their units convert. A fraction (``dur``) converts to the unit of ``max_duration``. Epochs and
    batches convert into each other through ``epoch_length``. Samples, tokens and seconds do not convert, because their
    number in a batch varies during the run.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock
        >>> clock = Clock(Timestamp(batch=25, batch_in_epoch=25), Time.parse("100ba"), epoch_length=50)
        >>> clock.progress("1dur"), clock.progress("1ep")
        (0.25, 0.5)
    """

    timestamp: Timestamp
    max_duration: Time
    epoch_length: int | None = None

    def progress(self, time: str | Time) -> float:
        """Return elapsed training time as a multiple of ``time``: 0.5 at half of it, 2.0 at twice.

        It advances with every batch, also for epochs. Raises TimeError if ``time`` is zero, or is in epochs while the
        length of an epoch is unknown.
        """
        time = Time.parse(time)
        unit = self.common_unit(time)
        length = self.convert(time, unit)
        if not length:
            raise TimeError(f"Progress through {time} is not defined, because its length is zero; give a longer time.")
        return self.now(unit) / length

    def common_unit(self, *times: Time) -> Unit:
        """Return the unit in which all of ``times`` can be compared; zero times are ignored.

        Raises:
            TimeError: there is no such unit.
        """
        units = {self.max_duration.unit if time.unit is Unit.DURATION else time.unit for time in times if time.value}
        if units == {Unit.EPOCH, Unit.BATCH}:
            return Unit.EPOCH
        if len(units) > 1:
            raise TimeError(
                f"{', '.join(str(time) for time in times if time.value)} cannot be compared in a run of "
                f"{self.max_duration}: only epochs and batches convert into each other, and 'dur' is a fraction of the "
                f"run's duration. Give all of them in one unit, or as fractions of the duration such as '0.05dur'."
            )
        return units.pop() if units else Unit.BATCH

    def convert(self, time: Time, unit: Unit) -> float:
        """Return ``time`` in ``unit``, as the float nearest to the exact value.

        Raises:
            TimeError: the units do not convert, or the conversion needs the length of an epoch and that is unknown.
        """
        value = _exact(time)
        if time.unit is Unit.DURATION:
            value, time = value * _exact(self.max_duration), self.max_duration
        if not value or time.unit is unit:
            return float(value)
        if time.unit is Unit.EPOCH and unit is Unit.BATCH:
            return float(value * self._epoch_length())
        if time.unit is Unit.BATCH and unit is Unit.EPOCH:
            return float(value / self._epoch_length())
        raise TimeError(f"{time} cannot be expressed in {unit}; only epochs and batches convert into each other.")

    def now(self, unit: Unit) -> float:
        """Return the position of the run in ``unit``; epochs include the fraction of the current epoch, by batches.

        Raises:
            TimeError: ``unit`` is epochs and the length of an epoch is unknown, or ``unit`` is ``dur``.
        """
        timestamp = self.timestamp
        if unit is Unit.BATCH:
            return timestamp.batch
        if unit is Unit.EPOCH:
            # One division of integers, so that the same position gives the same float here and in `convert`.
            length = self._epoch_length()
            return (timestamp.epoch * length + min(timestamp.batch_in_epoch, length)) / length
        return timestamp.count(unit)

    def _epoch_length(self) -> int:
        if not self.epoch_length:
            raise TimeError(
                "The number of batches per epoch is unknown, so epochs and batches do not convert. Give the duration and "
                "the schedule in 'ba', 'sp' or 'tok', or train on data that has a length."
            )
        return self.epoch_length


def _exact(time: Time) -> Fraction:
    """Return the decimal value exactly: 0.07 as 7/100, so that 0.07 of 100 batches is 7 batches."""
    return Fraction(str(time.value))


class Schedule:
    """Base class of schedules: parses times, converts them to one unit, and warms up. Subclasses define :meth:`factor`.

    Args:
        times: the times of the schedule, in the order of the arguments of :meth:`factor`.
        warmup: length of the linear rise from 0; ``"0ba"`` for no warm-up.

    Raises:
        TimeError: a text is not a time; when called, also: the times have no common unit.
        ValueError: an argument is out of its range; when called, also: the warm-up leaves no room for the schedule.

    Example:
        >>> import hocket
        >>> from hocket.schedules import Schedule
        >>> class InverseSqrt(Schedule):
        ...     def __init__(self, scale="100ba", *, warmup="0ba"):
        ...         super().__init__([scale], warmup)
        ...     def factor(self, now, warmup, scale):
        ...         return (1 + (now - warmup) / scale) ** -0.5
        >>> hocket.plugins.register("schedules", "inverse-sqrt", InverseSqrt)
    """

    def __init__(self, times: Sequence[str | Time], warmup: str | Time) -> None:
        self.warmup = Time.parse(warmup)
        self._times = (self.warmup, *(Time.parse(time) for time in times))
        self._resolved_for: tuple[Time, int | None] | None = None
        self._unit = Unit.BATCH
        self._points: tuple[float, ...] = ()

    def factor(self, now: float, warmup: float, *times: float) -> float:
        """Return the factor at ``now`` >= ``warmup``; all arguments are in one unit."""
        raise Unsupported(f"{type(self).__name__} needs a factor(now, warmup, ...)")

    def check(self, warmup: float, *times: float) -> None:
        """Raise ValueError if the times, in one unit, are inconsistent."""

    def __call__(self, clock: Clock) -> float:
        """Return the factor of the base learning rates for the step after ``clock.timestamp``."""
        resolved = self._resolved_for
        if resolved is None or resolved[0] is not clock.max_duration or resolved[1] != clock.epoch_length:
            self._resolve(clock)  # in the first step, and when the duration is extended
        points = self._points
        now, warmup = clock.now(self._unit), points[0]
        if now < warmup:
            return now / warmup * self.factor(warmup, *points)
        return self.factor(now, *points)

    def _resolve(self, clock: Clock) -> None:
        unit = clock.common_unit(*self._times)
        points = tuple(clock.convert(time, unit) for time in self._times)
        self.check(*points)
        self._unit, self._points = unit, points
        self._resolved_for = (clock.max_duration, clock.epoch_length)

    def __repr__(self) -> str:
        arguments = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        shown = (f"{name}={_plain(value)!r}" for name, value in arguments.items())
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Time) else value
