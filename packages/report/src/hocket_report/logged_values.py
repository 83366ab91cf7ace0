"""What a run logged, read in one pass and in bounded memory: curves with few enough points for a page, and their positions."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from hocket.basics import run_files as files

#: Points of all curves of a page, and of one curve at least.
_POINTS, _LEAST = 20_000, 40
#: While a file is read: points of a curve, rows of which the position is kept, and the most metrics of a run.
_THINNED, _ROWS, _NAMES = 512, 1 << 17, 5_000


def points(runs: int) -> int:
    """Return how many points of a curve are kept of each of some runs."""
    return max(_POINTS // max(runs, 1), _LEAST)


@dataclass(slots=True)
class Curve:
    """The points that draw a metric's curve: all values, or of each column of some values the first, last, least and greatest.

    This is M4 (Jugel et al. 2014, "M4: A Visualization-Oriented Time Series Data Aggregation"). A column's points include those
    of the columns that it is joined from, so that a curve can be thinned again and again while its file is read.
    """

    #: Of each point its number among all values, its row, and its value.
    numbers: array[int] = field(default_factory=lambda: array("q"))
    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    width: int = 1
    #: The number of all values, and of those that are not finite.
    count: int = 0
    odd: int = 0
    #: The latest of all values, and the least and greatest finite one.
    range: tuple[float, float, float] = (math.nan, math.nan, math.nan)

    def add(self, rows: Iterable[int], values: array[float]) -> None:
        """Append the values of these rows."""
        self.numbers.extend(range(self.count, self.count + len(values)))
        self.rows.extend(rows)
        self.values.extend(values)
        self.count += len(values)
        finite = values if _all_finite(values) else array("d", filter(math.isfinite, values))
        self.odd += len(values) - len(finite)
        _, least, most = self.range
        if finite:  # any number is between NaN and NaN
            low, high = min(finite), max(finite)
            least, most = low if not least <= low else least, high if not most >= high else most
        self.range = values[-1], least, most

    def thin(self, most: int) -> None:
        """Keep at most ``most`` points, four of a column. Non-finite values count neither as least nor as greatest."""
        if len(self.values) <= most:
            return
        width = -(-self.count // max(most // 4, 1))
        self.width *= -(-width // self.width)  # columns are joined, and never divided
        kept: list[int] = []
        begin = 0
        while begin < len(self.numbers):
            end = bisect_left(self.numbers, (self.numbers[begin] // self.width + 1) * self.width, begin)
            part = self.values[begin:end]
            chosen = {begin, end - 1}
            if _all_finite(part):
                chosen |= {begin + part.index(min(part)), begin + part.index(max(part))}
            elif finite := [index for index in range(begin, end) if math.isfinite(self.values[index])]:
                chosen |= {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
            kept += sorted(chosen)
            begin = end
        self.numbers = array("q", [self.numbers[index] for index in kept])
        self.rows = array("q", [self.rows[index] for index in kept])
        self.values = array("d", [self.values[index] for index in kept])


def _all_finite(values: array[float]) -> bool:
    """Whether all values are finite, quickly; False too if their sum is not."""
    return math.isfinite(sum(values))


@dataclass(slots=True)
class Logged:
    """What a run logged, in bounded memory however long it is: curves are thinned while they are read.

    Args:
        most: the points of a curve that are kept at the end.
    """

    most: int = _POINTS
    #: The number of rows.
    rows: int = 0
    #: The rows of which positions are kept, and these by name.
    kept: array[int] = field(default_factory=lambda: array("q"))
    positions: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in files.POSITION})
    series: dict[str, Curve] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    #: The last position.
    last: dict[str, float] = field(default_factory=dict)
    #: Number of malformed lines, without a truncated last line, which a killed run leaves; and why the rest is not read.
    damaged: int = 0
    problem: str = ""
    #: Batches at which the number of completed epochs changed.
    _knots: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    #: The number of kept positions at which those that no curve needs are dropped.
    _full: int = _ROWS

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of the file, with an empty one for each that is malformed."""
        self.damaged += lines.count({})
        if not self.hyperparameters:
            given = (line["hyperparameters"] for line in lines if "hyperparameters" in line)
            self.hyperparameters = next((each for each in given if isinstance(each, dict)), {})
        batches = [line.get("batch") for line in lines]
        if not _all_finite(_numbers(batches, len(batches))):
            lines = [line for line in lines if files.finite(line.get("batch")) is not None]
        if not lines:
            return
        self._add_positions(lines)
        # Rows of the same metrics are transposed together, which is much faster than one by one.
        alike: dict[tuple[str, ...], list[int]] = {}
        for number, line in enumerate(lines):
            alike.setdefault(tuple(line), []).append(number)
        found: dict[str, list[tuple[list[int], Sequence[Any]]]] = {}
        for names, numbers in alike.items():
            columns = zip(*[lines[number].values() for number in numbers], strict=True)
            for name, column in zip(names, columns, strict=True):
                found.setdefault(name, []).append((numbers, column))
        for name, parts in found.items():
            if name not in self.positions:
                self._add_values(name, *(parts[0] if len(parts) == 1 else _joined(parts, len(lines))))
        self.rows += len(lines)
        if len(self.kept) > self._full:
            self._drop_positions()
            self._full = max(2 * len(self.kept), _ROWS)

    def _add_positions(self, lines: Sequence[Mapping[str, Any]]) -> None:
        columns: Iterable[Sequence[Any]]
        try:
            columns = zip(*map(itemgetter(*self.positions), lines), strict=True)
        except KeyError:
            columns = ([line.get(name) for line in lines] for name in self.positions)
        for column, given in zip(self.positions.values(), columns, strict=True):
            values = _numbers(given, len(lines))
            if not _all_finite(values):
                values = array("d", [files.finite(each) or 0.0 for each in given])
            column.extend(values)
        self.kept.extend(range(self.rows, self.rows + len(lines)))
        numbers = {name: files.finite(lines[-1].get(name)) for name in files.POSITION}
        self.last = {name: each for name, each in numbers.items() if each is not None}
        new = len(lines)
        if max(self.positions["epoch"][-new:]) > self._knots[-1][1]:
            for batch, epoch in zip(self.positions["batch"][-new:], self.positions["epoch"][-new:], strict=True):
                if epoch > self._knots[-1][1] and batch > self._knots[-1][0]:
                    self._knots.append((batch, epoch))

    def _add_values(self, name: str, numbers: Sequence[int], given: Sequence[Any]) -> None:
        if name not in self.series and len(self.series) >= _NAMES:
            self.problem = f"has more than {_NAMES:,} metrics"
            return
        values = _numbers(given)
        if len(values) < len(given):
            numbers = [number for number, each in zip(numbers, given, strict=True) if files.number(each) is not None]
        if not values:
            return
        curve = self.series.setdefault(name, Curve())
        curve.add([self.rows + number for number in numbers], values)
        if len(curve.values) > 8 * max(self.most, _THINNED):
            curve.thin(max(self.most, _THINNED))

    def finish(self) -> None:
        """Keep only what is drawn."""
        for curve in self.series.values():
            curve.thin(self.most)
        self._drop_positions()

    def _drop_positions(self) -> None:
        needed = set().union(*(curve.rows for curve in self.series.values()))
        indices = [index for index, row in enumerate(self.kept) if row in needed]
        self.kept = array("q", [self.kept[index] for index in indices])
        for name, column in self.positions.items():
            self.positions[name] = array("d", [column[index] for index in indices])

    def epochs(self) -> list[float]:
        """Return completed epochs with fractions, interpolated between the rows at which the count changes."""
        batches, epochs, knots = self.positions["batch"], self.positions["epoch"], self._knots
        starts = [batch for batch, _ in knots]
        found = []
        for batch, epoch in zip(batches, epochs, strict=True):
            index = min(max(bisect_right(starts, batch) - 1, 0), len(knots) - 2)
            if len(knots) == 1:
                found.append(epoch)
                continue
            (left, low), (right, high) = knots[index], knots[index + 1]
            found.append(max(epoch, min(low + (batch - left) / (right - left) * (high - low), epoch + 1)))
        return found


def _joined(parts: Sequence[tuple[list[int], Sequence[Any]]], rows: int) -> tuple[Sequence[int], Sequence[Any]]:
    """Return the values of a metric in rows with different other metrics, in the order of the rows."""
    column: list[Any] = [None] * rows
    for numbers, values in parts:
        for number, value in zip(numbers, values, strict=True):
            column[number] = value
    return range(rows), column


def _numbers(given: Sequence[Any], all_of: int | None = None) -> array[float]:
    """Return values as numbers, without those that are none; with ``all_of``, a NaN if there are fewer."""
    if set(map(type, given)) <= {int, float}:
        with suppress(OverflowError):  # an integer of hundreds of digits
            return array("d", given)
    found = [each for each in map(files.number, given) if each is not None]
    return array("d", found if all_of in (None, len(found)) else [math.nan])


def read(path: Path, most: int = _POINTS, advance: Callable[[], None] = lambda: None) -> Logged:
    """Read a file of metrics. Skip malformed lines, and lines of another kind.

    Args:
        most: the points of a curve that are kept.
        advance: called now and then.
    """
    logged = Logged(most)
    try:
        for lines in files.blocks(path):
            logged.add(lines)
            advance()
    except FileNotFoundError:
        pass
    except OSError as error:
        logged.problem = f"is not read further: {error.strerror}"
    logged.finish()
    return logged


def downsampled(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most ``most`` values that draw the same line; see `Curve`.

    Example:
        >>> from hocket_report.logged_values import downsampled
        >>> downsampled([0, 0, 9, 0, 0, 0, 0, -9, 0, 0], 8)
        [0, 2, 4, 5, 7, 9]
    """
    curve = Curve()
    curve.add(range(len(values)), array("d", values))
    curve.thin(most)
    return list(curve.numbers)
