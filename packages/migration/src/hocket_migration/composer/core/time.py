"""Composer's times: one number with a unit, and the position of a run."""

from __future__ import annotations

import datetime
import functools
import re
import types
from enum import StrEnum
from typing import Any

import hocket
from hocket.errors import WrongState, WrongType, WrongValue


class TimeUnit(StrEnum):
    """The units of `Time`. The value is the suffix in texts such as ``"10ep"``."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        names = {unit.name.lower(): unit for unit in cls}
        text = str(value).lower()
        return names.get(text) or next((unit for unit in cls if unit.value == text), None)


_TEXT = re.compile(
    r"\s*(-?[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*(iter|ep|ba|sp|tok|dur|sec)\s*", re.I | re.A
)


@functools.total_ordering
class Time:
    """A number of epochs, batches, samples or tokens, or a fraction of the duration.

    It can be compared with, added to and divided by a Time of its unit, a number or a text. The quotient of two times is a
    fraction of the duration. Times a fraction or a number, counts are rounded down.

    Raises:
        TypeError: the value is not a whole number in a unit that is counted.
        ValueError: the text is not a time, or the unit is unknown.
        RuntimeError: two times have different units.

    Example:
        >>> from hocket_migration.composer import Time, TimeUnit
        >>> Time(3, "ba") < "5ba", Time.from_epoch(2) == 2, str(Time(10, TimeUnit.BATCH) * 0.55)
        (True, True, '5ba')
    """

    #: ``Time[int]`` and ``Time[float]`` are annotations.
    __class_getitem__: Any = classmethod(types.GenericAlias)

    def __init__(self, value: float, unit: str | TimeUnit) -> None:
        self.unit = TimeUnit(unit)
        if self.unit is TimeUnit.DURATION:
            value = float(value)
        elif not isinstance(value, int):
            raise WrongType(
                f"A Time in {self.unit.value} is a whole number, not {value!r}. Write Time({int(value)}, …)."
            )
        self.value: Any = value

    @classmethod
    def from_iteration(cls, iteration: int) -> Time:
        """Return a number of iterations."""
        return cls(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> Time:
        """Return a number of epochs."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> Time:
        """Return a number of batches."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> Time:
        """Return a number of samples."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> Time:
        """Return a number of tokens."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time:
        """Return a fraction of the duration."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, timestring: str | datetime.timedelta) -> Time:
        """Return whole seconds from a text such as ``"1h30m"``, or from a timedelta."""
        if isinstance(timestring, datetime.timedelta):
            return cls(int(timestring.total_seconds()), TimeUnit.SECOND)
        time = cls.from_timestring(timestring)
        if time.unit is not TimeUnit.SECOND:
            raise WrongValue(f"{timestring!r} is not a time of the clock. Write '1h30m0s' or the like.")
        return time

    @classmethod
    def from_input(cls, i: Any, default_int_unit: str | TimeUnit | None = None) -> Time:
        """Return a time from a Time, a text such as ``"10ep"``, or a number of ``default_int_unit``."""
        if isinstance(i, Time):
            return i
        if isinstance(i, str):
            return cls.from_timestring(i)
        if isinstance(i, int) and default_int_unit is not None:
            return cls(i, default_int_unit)
        raise WrongValue(f"{i!r} is not a time. Write a text with a unit, such as '10ep', '100ba' or '0.5dur'.")

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Return the time that a text such as ``"10ep"``, ``"3e10sp"``, ``"0.5dur"`` or ``"1h30m"`` gives."""
        found = _TEXT.fullmatch(timestring)
        if found is None:
            seconds = hocket.Time.parse(timestring)  # a ValueError that says what may be written
            return cls(int(seconds.value), TimeUnit.SECOND)
        unit = TimeUnit(found[2].lower())
        number = float(found[1])
        if unit is not TimeUnit.DURATION and number != int(number):
            raise WrongType(f"{timestring!r} is not a whole number of {unit.name.lower()}s.")
        return cls(number if unit is TimeUnit.DURATION else int(number), unit)

    def to_timestring(self) -> str:
        """Return the text, such as ``"10ep"``."""
        return f"{self.value}{self.unit.value}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value}, TimeUnit.{self.unit.name})"

    def _other(self, other: Any) -> Any:
        """Return the value of something of the same unit."""
        if isinstance(other, int | float):
            return other
        if not isinstance(other, Time | str):
            raise WrongType(f"{self} cannot be combined with {other!r}, which is not a time.")
        other = Time.from_input(other)
        if other.unit is not self.unit:
            raise WrongState(
                f"{self} and {other} have different units. Give both in one, such as state.timestamp.get('{self.unit.value}')."
            )
        return other.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Time | str | int | float) and bool(self.value == self._other(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < self._other(other))

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    __index__ = __int__

    def __add__(self, other: Any) -> Time:
        return Time(self.value + self._other(other), self.unit)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Time:
        return Time(self.value - self._other(other), self.unit)

    def __rsub__(self, other: Any) -> Time:
        return Time(self._other(other) - self.value, self.unit)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __pos__(self) -> Time:
        return self

    def __mod__(self, other: Any) -> Time:
        return Time(self.value % self._other(other), self.unit)

    def __mul__(self, other: Any) -> Time:
        if isinstance(other, Time | str):
            other = Time.from_input(other)
            if other.unit is not TimeUnit.DURATION:
                return other * self if self.unit is TimeUnit.DURATION else Time(self._other(other), self.unit)
            other = other.value
        value = self.value * other
        return Time(value if self.unit is TimeUnit.DURATION else int(value), self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Time:
        if isinstance(other, int | float):
            value = self.value / other
            return Time(value if self.unit is TimeUnit.DURATION else int(value), self.unit)
        return Time(self.value / self._other(other), TimeUnit.DURATION)


def ensure_time(maybe_time: Time | str | int, int_unit: TimeUnit | str = TimeUnit.EPOCH) -> Time:
    """Return a Time from a Time, a text or a number of ``int_unit``.

    Example:
        >>> from hocket_migration.composer.core import ensure_time
        >>> str(ensure_time(3, "ep"))
        '3ep'
    """
    return Time.from_input(maybe_time, int_unit)


_OF_ITERATIONS = ("iteration", "epoch_in_iteration", "token_in_iteration")
_COUNTS = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
#: hocket's names of wall-clock times.
_WALL_CLOCK = {"total_wct": "seconds", "epoch_wct": "epoch_seconds", "batch_wct": "batch_seconds"}


class Timestamp:
    """The position of a run. Each count is a `Time`; wall-clock times are `datetime.timedelta`.

    Args:
        position: hocket's; None for the beginning.
        values: counts, as numbers or times, and wall-clock times, which replace those of ``position``.

    Raises:
        TypeError: there is no such count.

    Example:
        >>> from hocket_migration.composer import Timestamp
        >>> now = Timestamp(epoch=1, batch=6, batch_in_epoch=2)
        >>> now.batch == 6, now >= "1ep", now.get("ba"), now.to_next_batch(samples=8)
        (True, True, Time(6, TimeUnit.BATCH), Timestamp(epoch=1, batch=7, sample=8, token=0))
    """

    def __init__(self, position: hocket.Timestamp | None = None, **values: Any) -> None:
        self._position = hocket.Timestamp() if position is None else position.copy()
        #: Counts of iterations, which hocket does not have; those of the current one are else those of the run.
        self._iterations: dict[str, Any] = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in _WALL_CLOCK:
                setattr(self._position, _WALL_CLOCK[name], value.total_seconds())
            elif name == "iteration_wct":
                self._iterations[name] = value
            elif name in (*_COUNTS, *_OF_ITERATIONS):
                count = int(Time.from_timestring(value) if isinstance(value, str) else value)
                if name in _OF_ITERATIONS:
                    self._iterations[name] = count
                else:
                    setattr(self._position, name, count)
            else:
                known = (*_COUNTS, *_OF_ITERATIONS, *_WALL_CLOCK, "iteration_wct")
                raise WrongType(f"A Timestamp has no {name}=. It has {', '.join(known)}.")

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as numbers, and the wall-clock times."""
        names = ("iteration", *_COUNTS, "epoch_in_iteration", "token_in_iteration")
        counts = {name: getattr(self, name).value for name in names}
        return counts | {name: getattr(self, name) for name in (*_WALL_CLOCK, "iteration_wct")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take counts and times from what :meth:`state_dict` returned."""
        names = (*_COUNTS, *_WALL_CLOCK, *_OF_ITERATIONS, "iteration_wct")
        loaded = self.copy(**{name: state[name] for name in names if name in state})
        self._position, self._iterations = loaded._position, loaded._iterations

    def copy(self, **values: Any) -> Timestamp:
        """Return a copy with some of its counts and times replaced."""
        return Timestamp(self._position, **{**self._iterations, **values})

    def to_next_batch(
        self, samples: int | Time = 0, tokens: int | Time = 0, duration: datetime.timedelta | None = None
    ) -> Timestamp:
        """Return the position after another batch, of so many samples and tokens on all ranks."""
        after, seconds = self.copy(), 0.0 if duration is None else duration.total_seconds()
        after._position.next_batch(int(samples), int(tokens), seconds)
        after._add(token_in_iteration=int(tokens), iteration_wct=datetime.timedelta(seconds=seconds))
        return after

    def to_next_epoch(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """Return the position after the end of the epoch, which took so much more time."""
        more = duration or datetime.timedelta()
        after = self.copy(total_wct=self.total_wct + more)
        after._position.next_epoch()
        after._add(epoch_in_iteration=1, iteration_wct=more)
        return after.copy(epoch_wct=datetime.timedelta(), batch_wct=datetime.timedelta())

    def to_next_iteration(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """Return the position after the end of the iteration, which took so much more time."""
        of_epoch = {"batch_in_epoch": 0, "sample_in_epoch": 0, "token_in_epoch": 0}
        walls = dict.fromkeys(("iteration_wct", "epoch_wct", "batch_wct"), datetime.timedelta())
        return self.copy(
            iteration=self.iteration.value + 1, epoch_in_iteration=0, token_in_iteration=0, **of_epoch, **walls,
            total_wct=self.total_wct + (duration or datetime.timedelta()),
        )  # fmt: skip

    def _add(self, **more: Any) -> None:
        """Add to counts of the current iteration that differ from those of the run."""
        for name, value in more.items():
            if name in self._iterations:
                self._iterations[name] += value

    @property
    def iteration(self) -> Time:
        """Completed iterations: 0 in a run of hocket's, where they have no length."""
        return Time(self._iterations.get("iteration", 0), TimeUnit.ITERATION)

    @property
    def epoch(self) -> Time:
        """Completed epochs."""
        return Time(self._position.epoch, TimeUnit.EPOCH)

    @property
    def epoch_in_iteration(self) -> Time:
        """Completed epochs of the current iteration."""
        return Time(self._iterations.get("epoch_in_iteration", self._position.epoch), TimeUnit.EPOCH)

    @property
    def batch(self) -> Time:
        """Batches trained on."""
        return Time(self._position.batch, TimeUnit.BATCH)

    @property
    def sample(self) -> Time:
        """Samples trained on."""
        return Time(self._position.sample, TimeUnit.SAMPLE)

    @property
    def token(self) -> Time:
        """Tokens trained on."""
        return Time(self._position.token, TimeUnit.TOKEN)

    @property
    def token_in_iteration(self) -> Time:
        """Tokens of the current iteration."""
        return Time(self._iterations.get("token_in_iteration", self._position.token), TimeUnit.TOKEN)

    @property
    def batch_in_epoch(self) -> Time:
        """Batches of the current epoch."""
        return Time(self._position.batch_in_epoch, TimeUnit.BATCH)

    @property
    def sample_in_epoch(self) -> Time:
        """Samples of the current epoch."""
        return Time(self._position.sample_in_epoch, TimeUnit.SAMPLE)

    @property
    def token_in_epoch(self) -> Time:
        """Tokens of the current epoch."""
        return Time(self._position.token_in_epoch, TimeUnit.TOKEN)

    @property
    def total_wct(self) -> datetime.timedelta:
        """Wall-clock time of training."""
        return datetime.timedelta(seconds=self._position.seconds)

    @property
    def iteration_wct(self) -> datetime.timedelta:
        """Wall-clock time of the current iteration."""
        found: datetime.timedelta = self._iterations.get("iteration_wct", self.total_wct)
        return found

    @property
    def epoch_wct(self) -> datetime.timedelta:
        """Wall-clock time of the current epoch."""
        return datetime.timedelta(seconds=self._position.epoch_seconds)

    @property
    def batch_wct(self) -> datetime.timedelta:
        """Wall-clock time of the last batch."""
        return datetime.timedelta(seconds=self._position.batch_seconds)

    def get(self, unit: str | TimeUnit) -> Time:
        """Return the count in a unit; of seconds, whole ones. Raises ValueError for a fraction of the duration."""
        unit = TimeUnit(unit)
        if unit is TimeUnit.SECOND:
            return Time(int(self._position.seconds), unit)
        if unit is TimeUnit.DURATION:
            raise WrongValue("A timestamp does not know the duration; call state.get_elapsed_duration().")
        return getattr(self, unit.name.lower())  # type: ignore[no-any-return]  # all of these are times

    def _compared(self, other: Any) -> tuple[Any, Any]:
        if isinstance(other, Timestamp):
            return self._position.batch, other._position.batch
        time = Time.from_input(other)
        return self.get(time.unit).value, time.value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.state_dict() == other.state_dict()
        if not isinstance(other, Time | str):
            return NotImplemented
        mine, others = self._compared(other)
        return bool(mine == others)

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: Any) -> bool:
        mine, others = self._compared(other)
        return bool(mine < others)

    def __le__(self, other: Any) -> bool:
        mine, others = self._compared(other)
        return bool(mine <= others)

    def __gt__(self, other: Any) -> bool:
        mine, others = self._compared(other)
        return bool(mine > others)

    def __ge__(self, other: Any) -> bool:
        mine, others = self._compared(other)
        return bool(mine >= others)

    def __repr__(self) -> str:
        at = self._position
        return f"Timestamp(epoch={at.epoch}, batch={at.batch}, sample={at.sample}, token={at.token})"
