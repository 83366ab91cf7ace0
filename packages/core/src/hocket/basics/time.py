"""Time in training: lengths (`Time`) and recurrence (`Interval`). `hocket.basics.timestamp` has the position of a run."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.errors import WrongType, WrongValue

if TYPE_CHECKING:
    from fractions import Fraction

    from hocket.basics.timestamp import Timestamp

__all__ = ["Interval", "Time", "TimeError", "Unit", "batches", "interval_of", "share", "time_of", "whole"]


class TimeError(WrongValue):
    """A text or number that is not a time, or a time that has no meaning where it was given."""


class Unit(enum.StrEnum):
    """A unit of training time. The value is the suffix in texts such as ``"10ep"``.

    Example:
        >>> from hocket.basics.time import Unit
        >>> Unit("ep")
        <Unit.EPOCH: 'ep'>
    """

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"  # fraction of the total duration
    SECOND = "sec"  # wall-clock seconds of training


_CONTINUOUS = (Unit.DURATION, Unit.SECOND)
#: The attribute of a `Timestamp` that counts a unit.
FIELDS = {
    Unit.EPOCH: "epoch",
    Unit.BATCH: "batch",
    Unit.SAMPLE: "sample",
    Unit.TOKEN: "token",
    Unit.SECOND: "seconds",
}
_GRAMMAR = (
    "Write a number and a unit: ep (epochs), ba (batches), sp (samples), tok (tokens), dur (fraction of the total duration), "
    "or a time of d, h, m or min, s or sec; for example '10ep', '1000ba', '5e6sp', '2e9tok', '0.1dur', '90min', '1h30m'."
)
#: Words that people write for a unit.
_WORDS = {
    "ep": "e epoch epochs",
    "ba": "b batch batches step steps iter iters iteration iterations it",
    "sp": "sample samples example examples",
    "tok": "t token tokens",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "s": "second seconds secs",
}
# The exponent is bounded so that '1e999999999tok' raises immediately instead of computing that power.
_NUMBER = r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?"
_COUNT = re.compile(rf"\s*({_NUMBER})\s*(ep|ba|sp|tok|dur)\s*", re.ASCII | re.IGNORECASE)
_CLOCK = re.compile(
    r"\s*"
    rf"(?:({_NUMBER})\s*d\s*)?(?:({_NUMBER})\s*h\s*)?(?:({_NUMBER})\s*m(?:in)?\s*)?(?:({_NUMBER})\s*s(?:ec)?\s*)?",
    re.ASCII | re.IGNORECASE,
)
_CLOCK_SECONDS = (86_400, 3_600, 60, 1)


@dataclass(frozen=True, slots=True, repr=False)
class Time:
    """A length of training, such as ``Time(10, Unit.EPOCH)``; never negative.

    ``value`` is an int for epochs, batches, samples and tokens, and a float for ``dur`` and ``sec``. ``str(time)`` is a
    text that :meth:`parse` reads back as the same time.

    Times of one unit can be added, subtracted, compared and divided by each other (a float). A time multiplied or
    divided by a number is a time, rounded to the nearest whole epoch, batch, sample or token, halves to even. Times of
    different units are unequal; adding or ordering them raises TypeError, because how long an epoch is depends on the
    run.

    Raises:
        TimeError: the value is negative, not finite, or not whole in a unit that is counted.

    Example:
        >>> from hocket.basics.time import Time
        >>> Time.parse("90min")
        Time(5400.0, 'sec')
        >>> str(Time.parse("5e6sp") / 2)
        '2500000sp'
    """

    value: int | float
    unit: Unit

    def __post_init__(self) -> None:
        value: object = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TimeError(f"The value of a Time is a number, not {value!r}. {_GRAMMAR}")
        try:
            unit = Unit(self.unit)
            number = float(value)
        except ValueError:
            raise TimeError(f"{self.unit!r} is not a unit of time; use one of {', '.join(Unit)}.") from None
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or value < 0:
            shown = text if len(text := repr(value)) < 32 else f"A number of {len(text)} digits in"
            raise TimeError(
                f"{shown} {unit} is not a length of time: give a finite number that is not negative, below 1.8e308."
            )
        if unit not in _CONTINUOUS:
            number = int(value)
            if number != value:
                raise TimeError(_not_whole(value, unit))
        object.__setattr__(self, "value", number)
        object.__setattr__(self, "unit", unit)

    @classmethod
    def parse(cls, text: str | Time) -> Time:
        """Parse ``"10ep"``, ``"4_000ba"``, ``"5e6sp"``, ``"2e9tok"``, ``"0.1dur"``, ``"90min"``, ``"1h30m15s"``.

        Case and spaces around numbers and units do not matter. Days, hours, minutes and seconds stand in this order and
        become seconds. A Time is returned unchanged. Raises TimeError for anything else, including a number without a unit.

        Example:
            >>> import hocket
            >>> hocket.Time.parse("1h30m") == hocket.Time.parse("90min")
            True
        """
        if isinstance(text, Time):
            return text
        if isinstance(text, int | float) and not isinstance(text, bool):
            text = str(text)
        if not isinstance(text, str):
            raise TimeError(f"{text!r} is not a time. {_GRAMMAR}")
        try:
            from fractions import Fraction  # with decimal, the slowest part of importing this module

            if match := _COUNT.fullmatch(text):
                unit = Unit(match[2].lower())
                amount = Fraction(match[1])
                if unit in _CONTINUOUS:
                    return cls(_as_float(amount), unit)
                if amount.denominator != 1:
                    raise TimeError(_not_whole(match[1], unit))
                return cls(amount.numerator, unit)
            if (match := _CLOCK.fullmatch(text)) and any(match.groups()):
                parts = zip(match.groups(), _CLOCK_SECONDS, strict=True)
                return cls(_as_float(sum(Fraction(part) * scale for part, scale in parts if part)), Unit.SECOND)
        except TimeError as error:
            raise TimeError(f"{text!r} is not a time: {error}") from None
        except ValueError:  # more digits than Python converts
            raise TimeError(f"A number of {len(text)} characters is not a time. {_GRAMMAR}") from None
        if re.fullmatch(rf"\s*{_NUMBER}\s*", text, re.ASCII | re.IGNORECASE):
            number = text.strip()
            if 0 < float(number) < 1:
                raise TimeError(
                    f"{number!r} has no unit. Add the unit: '{number}dur' for a fraction of the total duration, or '{number}s' "
                    "for seconds. Epochs ('1ep'), batches ('1ba'), samples and tokens are whole numbers."
                )
            raise TimeError(
                f"{number!r} has no unit. Add the unit: '{number}ep' for epochs, '{number}ba' for batches, "
                f"'{number}sp' for samples, '{number}tok' for tokens, '{number}s' for seconds, or 'dur' for a fraction of "
                "the total duration, as in '0.1dur'."
            )
        words = re.fullmatch(rf"\s*(-?)({_NUMBER})?\s*[-_ ]?\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
        if words and words[1]:
            raise TimeError(f"{text!r} is negative, and a time is not. For a very long one write '1e9ba'. {_GRAMMAR}")
        unit_text = next(
            (unit for unit, others in _WORDS.items() if words and words[3].lower() in [unit, *others.split()]), None
        )
        write = f"Write '{words[2] or 1}{unit_text}'. " if words and unit_text else ""
        raise TimeError(f"{text!r} is not a time. {write}{_GRAMMAR}")

    def __repr__(self) -> str:
        return f"Time({self.value!r}, {str(self.unit)!r})"

    def __str__(self) -> str:
        number = repr(self.value)
        return f"{number.removesuffix('.0')}{self.unit}"

    def __add__(self, other: Time) -> Time:
        return Time(self.value + self._same(other, "added to"), self.unit)

    def __sub__(self, other: Time) -> Time:
        if self < other:
            raise TimeError(f"{self} - {other} would be negative, and a Time never is. Compare the two first.")
        return Time(self.value - other.value, self.unit)

    def __mul__(self, number: float) -> Time:
        return self._scaled(number, lambda a, b: a * b)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        """Return a float for a Time of the same unit, a Time for a number."""
        if isinstance(other, Time):
            return self.value / self._same(other, "divided by")
        return self._scaled(other, lambda a, b: a / b)

    def __lt__(self, other: Time) -> bool:
        return self.value < self._same(other, "compared with")

    def __le__(self, other: Time) -> bool:
        return self.value <= self._same(other, "compared with")

    def __gt__(self, other: Time) -> bool:
        return self.value > self._same(other, "compared with")

    def __ge__(self, other: Time) -> bool:
        return self.value >= self._same(other, "compared with")

    def _same(self, other: Time, verb: str) -> int | float:
        if not isinstance(other, Time):
            raise WrongType(f"{self} cannot be {verb} {other!r}, which is not a Time. Use Time.parse to make it one.")
        if other.unit is not self.unit:
            raise WrongType(
                f"{self} cannot be {verb} {other}: the units {self.unit} and {other.unit} differ, and how one converts "
                "to the other depends on the run. Give both in one unit."
            )
        return other.value

    def _scaled(self, number: float, operation: Callable[[Any, Any], Any]) -> Time:
        if isinstance(number, Time) or not isinstance(number, int | float):
            raise WrongType(f"{self} can be multiplied or divided by a number, not by {number!r}.")
        if self.unit in _CONTINUOUS or not math.isfinite(number):
            return Time(operation(float(self.value), number), self.unit)
        from fractions import Fraction

        return Time(round(operation(Fraction(self.value), Fraction(number))), self.unit)


def _not_whole(number: object, unit: Unit) -> str:
    name = "batches" if unit is Unit.BATCH else f"{FIELDS[unit]}s"
    return (
        f"{number}{unit} is not a whole number of {name}. Give a whole number, or use a finer unit: batches "
        "('ba') instead of epochs, or a fraction of the duration such as '0.1dur'."
    )


def _as_float(number: Fraction | int) -> float:
    """Return the nearest float, including infinity; Fraction itself raises OverflowError."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


#: A quotient of times this much below an integer counts as that integer. The rounding error of quotients such as 0.7 / 0.1
#: is about 1e-16 of their value; the tolerance is far above that, and far below one batch of any interval.
_TOLERANCE = 1e-9


def whole(number: float) -> int:
    """Return the floor of a non-negative ``number``, but the next integer if that is at most 1e-9 away."""
    return int(number + _TOLERANCE)


class Interval:
    """A recurring point in training: ``Interval("500ba")``, ``"1ep"``, ``"0.25dur"``, ``"10min"``, ``"3000sp"``.

    ``None``, ``0`` and ``"0ba"`` stand for never. ``every`` is the Time, or None for never. An interval is truthy
    unless it is never due.

    Raises:
        TimeError: ``every`` is not a time.

    Example:
        >>> import hocket
        >>> every = hocket.Interval("100ba")
        >>> every.due(hocket.Timestamp(batch=99), hocket.Timestamp(batch=100))
        True
    """

    __slots__ = ("_amount", "_at_epoch_end", "_field", "every")

    #: Whether an evaluation set with this interval is evaluated once more at the end of a fit; a subclass may set it to False.
    at_end: ClassVar[bool] = True

    def __init__(self, every: str | Time | Interval | int | None) -> None:
        if isinstance(every, Interval):
            every = every.every
        if every is not None and (isinstance(every, bool) or every != 0):
            every = Time.parse(every)  # type: ignore[arg-type]  # a number without a unit is refused there
        self.every: Time | None = every if isinstance(every, Time) and every.value else None
        # Precomputed, because `due` is called several times per batch.
        unit = self.every.unit if self.every else None
        self._field = None if unit is None else FIELDS.get(unit)
        self._amount: int | float = self.every.value if self.every else 0
        self._at_epoch_end = unit is Unit.EPOCH

    @classmethod
    def parse(cls, every: str | Time | Interval | int | None) -> Interval:
        """Return ``Interval(every)``."""
        return cls(every)

    def due(
        self,
        previous: Timestamp,
        now: Timestamp,
        elapsed_before: float | None = None,
        elapsed_now: float | None = None,
    ) -> bool:
        """Whether a multiple of the interval was reached: ``floor(previous / every) != floor(now / every)``.

        An interval in epochs is due only when an epoch has just been counted (``now.batch_in_epoch == 0``). One in
        ``dur`` needs the completed fractions of the duration at both timestamps, from 0.0 to 1.0. A multiple counts as
        reached 1e-9 intervals early, so that rounding of quotients does not miss a multiple of ``0.1dur``.

        Raises:
            TimeError: the interval is in ``dur`` and a fraction was not given.

        Example:
            >>> import hocket
            >>> hocket.Interval("10ba").due(hocket.Timestamp(batch=9), hocket.Timestamp(batch=10))
            True
        """
        amount, field = self._amount, self._field
        if field is not None:
            if self._at_epoch_end and now.batch_in_epoch:
                return False
            return bool(getattr(previous, field) // amount != getattr(now, field) // amount)
        if not amount:
            return False
        if elapsed_before is None or elapsed_now is None:
            raise TimeError(
                f"The interval {self.every} is a fraction of the total duration; pass elapsed_before and elapsed_now, the "
                "completed fractions at the two timestamps."
            )
        return int(elapsed_before / amount + _TOLERANCE) != int(elapsed_now / amount + _TOLERANCE)

    def __bool__(self) -> bool:
        return self.every is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interval) and self.every == other.every

    def __hash__(self) -> int:
        return hash(self.every)

    def __reduce__(self) -> tuple[type[Interval], tuple[Time | None]]:
        return Interval, (self.every,)

    def __repr__(self) -> str:
        return f"Interval({str(self.every) if self.every else None!r})"


def time_of(given: str | Time, argument: str) -> Time:
    """Parse an argument that is a time. Raises TimeError, which names the argument."""
    try:
        return Time.parse(given)
    except TimeError as error:
        raise TimeError(f"«{argument}={given!r}»: {error}") from None


def interval_of(given: str | Time | Interval | int | None, argument: str, optional: bool = True) -> Interval:
    """Parse an argument that is an interval, or None for never. Raises TimeError, which names the argument, for zero too.

    Args:
        optional: whether to advise None instead of zero.
    """
    if isinstance(given, Interval) or given is None:
        return Interval(given)
    time = Time(0, Unit.BATCH) if given == 0 and not isinstance(given, bool) else time_of(given, argument)  # type: ignore[arg-type]
    if not time.value:
        otherwise = f", or «{argument}=None» for never" if optional else ""
        raise TimeError(f"«{argument}={given!r}» is never due. Write an interval, such as '1ep' or '500ba'{otherwise}.")
    return Interval(time)


def batches(given: int, argument: str = "every") -> int:
    """Check an argument that is a number of batches, and return it. Raises ValueError unless it is a positive int."""
    if isinstance(given, str) and given.removesuffix("ba").isdecimal() and given.endswith("ba"):
        raise WrongValue(
            f"«{argument}={given!r}» is not a number of batches; write «{argument}={given.removesuffix('ba')}»."
        )
    if type(given) is not int or given < 1:
        raise WrongValue(f"«{argument}={given!r}» is not a number of batches; give an int of 1 or more, such as 10.")
    return given


def share(given: float, argument: str) -> float:
    """Check an argument that is a number of batches or a fraction of all, and return it. Raises ValueError."""
    if type(given) is float and 0 < given <= 1:
        return given
    if type(given) is not int or given < 1:
        raise WrongValue(
            f"«{argument}={given!r}» is not a number of batches; give an int of 1 or more, such as 10, or the fraction of all "
            "batches as a float above 0.0 and up to 1.0, such as 0.1."
        )
    return given
