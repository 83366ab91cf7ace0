"""Rank checkpoints by a metric that was evaluated where they were written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Stands for the best checkpoint of a folder, unless something there has this name.
BEST = "best"


def ranked(abouts: Mapping[str, Mapping[str, Any]], metric: str, mode: str) -> list[tuple[float, str]]:
    """Return values and names of the checkpoints at which the metric was evaluated, the best first.

    Args:
        abouts: their descriptions, by name.
        mode: ``"max"`` or ``"min"``.
    """
    evaluated = {name: each for name, each in abouts.items() if metric in each.get("evaluated", ())}
    values = [(finite(each["metrics"].get(metric)), name) for name, each in evaluated.items()]
    known = [(value, name) for value, name in values if value is not None]
    return sorted(known, key=lambda item: item[0], reverse=mode == "max")


def best_of(abouts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the best checkpoint by the rule of the newest one that has a rule, or None."""
    rules = [each["ranked_by"] for each in abouts.values() if each.get("ranked_by")]
    return next((name for _, name in ranked(abouts, *rules[-1])), None) if rules else None


def finite(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
