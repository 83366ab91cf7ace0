"""Curves: what a run logged, in panels of related metrics, with few enough points for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket_report.logged_values import Logged, points

#: The sections of the page: title, the prefixes of metrics there, and what to add to a run without any.
SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Loss", ("loss",), "loggers: [jsonl]"),
    ("Metrics", (), "metrics: [accuracy]"),
    ("Learning rate", ("lr", "momentum"), "callbacks: [lr-monitor]"),
    ("Throughput", ("speed", "time"), "callbacks: [speed-monitor]"),
    ("Memory", ("memory",), "callbacks: [memory-monitor]"),
    ("Other values", (), ""),
)


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
    most = points(total)
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
                    curve = run.series[label]
                    curve.thin(most)
                    reduced = reduced or len(curve.values) < curve.count
                    kept[number].update(dict.fromkeys(curve.rows, 0))
                    curves.append(
                        {
                            "run": number, "label": label, "at": list(curve.rows), "y": [*map(_short, curve.values)],
                            "of": curve.count, "odd": curve.odd,
                        }
                    )  # fmt: skip
            found.append({"section": title, "title": shared, "curves": curves})
    positions = []
    for number, run in enumerate(runs):
        places = [place for place, row in enumerate(run.kept) if row in kept[number]]
        kept[number] = {run.kept[place]: index for index, place in enumerate(places)}
        columns: Mapping[str, Sequence[float]] = run.positions | {"epoch": run.epochs()}
        positions.append({name: [_short(column[place]) for place in places] for name, column in columns.items()})
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
