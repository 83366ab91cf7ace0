"""Curves: what a run logged, in panels of related metrics, with few enough points for a page."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.runs import files

#: Points of all curves of a page, and of one curve at least.
_POINTS, _LEAST = 20_000, 40
#: The sections of the page: title, the prefixes of metrics there, and what to add to a run without any.
SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Loss", ("loss",), "loggers: [jsonl]"),
    ("Metrics", (), "metrics: [accuracy]"),
    ("Learning rate", ("lr", "momentum"), "callbacks: [lr-monitor]"),
    ("Throughput", ("speed", "time"), "callbacks: [speed-monitor]"),
    ("Memory", ("memory",), "callbacks: [memory-monitor]"),
    ("Other values", (), ""),
)


@dataclass(slots=True)
class Logged:
    """What a run logged: its positions, and the rows and values of each metric."""

    positions: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in files.POSITION})
    series: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    #: Number of malformed lines, without a truncated last line, which a killed run leaves.
    damaged: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.positions["batch"])

    def epochs(self) -> list[float]:
        """Return completed epochs with fractions, interpolated between the rows at which the count changes."""
        batches, epochs = self.positions["batch"], self.positions["epoch"]
        knots: list[tuple[float, float]] = [(0.0, 0.0)]
        for batch, epoch in zip(batches, epochs, strict=True):
            if epoch > knots[-1][1] and batch > knots[-1][0]:
                knots.append((batch, epoch))
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


def read(path: Path) -> Logged:
    """Read a file of metrics. Skip malformed lines, and lines of another kind."""
    logged = Logged()
    for line in files.lines(path):
        if not line:
            logged.damaged += 1
        if isinstance(line.get("hyperparameters"), dict):
            logged.hyperparameters = logged.hyperparameters or line["hyperparameters"]
        position = {name: files.finite(line.get(name)) for name in files.POSITION}
        if position["batch"] is None:
            continue
        row = logged.rows
        for name, column in logged.positions.items():
            column.append(position[name] or 0.0)
        for name, value in line.items():
            if name in position or (found := files.number(value)) is None:
                continue
            rows, values = logged.series.setdefault(name, (array("q"), array("d")))
            rows.append(row)
            values.append(found)
    return logged


def downsampled(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most ``most`` values that draw the same line: of each column of pixels the first, the last, the
    least and the greatest (M4; Jugel et al. 2014, "M4: A Visualization-Oriented Time Series Data Aggregation").

    Non-finite values count neither as least nor as greatest; a column of only those keeps its first and last.

    Example:
        >>> from hocket_report.curves import downsampled
        >>> downsampled([0, 0, 9, 0, 0, 0, 0, -9, 0, 0], 8)
        [0, 2, 4, 5, 7, 9]
    """
    if len(values) <= most:
        return list(range(len(values)))
    columns = max(most // 4, 1)
    kept: list[int] = []
    for column in range(columns):
        begin, end = column * len(values) // columns, (column + 1) * len(values) // columns
        finite = [index for index in range(begin, end) if math.isfinite(values[index])]
        chosen = {begin, end - 1}
        if finite:
            chosen |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        kept += sorted(chosen)
    return kept


def section_of(name: str) -> str:
    """Return the title of the section that a metric is in."""
    prefix, _, rest = name.partition("/")
    last = name.rpartition("/")[2]
    for title, prefixes, _ in SECTIONS:
        if prefix in prefixes or (title == "Loss" and "loss" in last.lower()):
            return title
    known = prefix in ("train", "eval", "test", "val", "valid", "validation", "dev")
    return "Metrics" if known and rest else "Other values"


def charts(runs: Sequence[Logged], evaluated: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of all charts, JSON-like.

    ``positions`` has the kept rows of each run by axis, ``charts`` the curves with indices into them. Train and evaluation
    metrics of one name share a chart, as do the learning rates.

    Args:
        evaluated: names of evaluation metrics, whose labels may be any.
    """
    grouped: dict[str, dict[str, list[str]]] = {title: {} for title, _, _ in SECTIONS}
    names = dict.fromkeys(name for run in runs for name in run.series)
    for name in names:
        title = "Metrics" if name in evaluated and "loss" not in name else section_of(name)
        prefix, _, rest = name.partition("/")
        shared = rest if title in ("Loss", "Metrics") and rest else prefix if prefix == "lr" else name
        grouped[title].setdefault(shared, []).append(name)
    total = sum(len(run.series) for run in runs)
    most = max(_POINTS // max(total, 1), _LEAST)
    kept: list[dict[int, int]] = [{} for _ in runs]
    found: list[dict[str, Any]] = []
    reduced = False
    for title, panels in grouped.items():
        for shared, members in panels.items():
            curves = []
            for label in sorted(members, key=lambda each: (not each.startswith("train/"), each)):
                for number, run in enumerate(runs):
                    if label not in run.series:
                        continue
                    rows, values = run.series[label]
                    indices = downsampled(values, most)
                    reduced = reduced or len(indices) < len(values)
                    for index in indices:
                        kept[number].setdefault(rows[index], 0)
                    curves.append(
                        {
                            "run": number, "label": label, "at": [rows[index] for index in indices],
                            "y": [_short(values[index]) for index in indices], "of": len(values),
                            "odd": sum(not math.isfinite(value) for value in values),
                        }
                    )  # fmt: skip
            found.append({"section": title, "title": shared, "curves": curves})
    positions = []
    for number, run in enumerate(runs):
        order = sorted(kept[number])
        kept[number] = {row: index for index, row in enumerate(order)}
        columns: Mapping[str, Sequence[float]] = run.positions | {"epoch": run.epochs()}
        positions.append({name: [_short(column[row]) for row in order] for name, column in columns.items()})
    for chart in found:
        for curve in chart["curves"]:
            curve["at"] = [kept[curve["run"]][row] for row in curve["at"]]
    return {"positions": positions, "charts": found, "reduced": reduced}


def _short(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.5g}")
