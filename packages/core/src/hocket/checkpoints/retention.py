"""Keep the latest checkpoints of a run and the best by a metric, and prune the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

Abouts: TypeAlias = Mapping[str, Mapping[str, Any]]


class Retention:
    """Keep the latest ``keep`` checkpoints (None: all) and the best: ``(metric, "max" | "min", how many)``.

    ``abouts()`` reads the descriptions of the run's checkpoints by name, oldest first; it is called only if needed.
    """

    def __init__(self, keep: int | None, best: tuple[str, Literal["max", "min"], int] | None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} keeps nothing to resume from; give 1 or more, or None for all.")
        if best is not None and (len(best) != 3 or best[1] not in ("max", "min") or best[2] < 1):
            raise ValueError(
                f"best={best!r} is not (metric, 'max' or 'min', number of checkpoints). Write best=('test/accuracy', 'max', 1)."
            )
        self._keep, self._best = keep, best

    @property
    def metric(self) -> str | None:
        """The metric that ranks checkpoints, or None."""
        return None if self._best is None else self._best[0]

    def leads(self, metrics: Mapping[str, float], abouts: Callable[[], Abouts]) -> bool:
        """Whether a checkpoint with these metrics would be among the best."""
        if self._best is None or (value := self._value(metrics)) is None:
            return False
        _, mode, count = self._best
        kept = self._ranking(abouts())
        if len(kept) < count:
            return True
        worst = kept[-1][0]
        return value > worst if mode == "max" else value < worst

    def superfluous(self, abouts: Callable[[], Abouts]) -> list[str]:
        """Return the names of the checkpoints to remove, oldest first."""
        if self._keep is None:
            return []
        there = abouts()
        kept = {*list(there)[-self._keep :], *(name for _, name in self._ranking(there))}
        return [name for name in there if name not in kept]

    def _ranking(self, abouts: Abouts) -> list[tuple[float, str]]:
        """Return values and names of the best checkpoints, the best first."""
        if self._best is None:
            return []
        metric, mode, count = self._best
        values = [
            (self._value(about["metrics"]), name)
            for name, about in abouts.items()
            if metric in about.get("evaluated", ())
        ]
        known = [(value, name) for value, name in values if value is not None]
        return sorted(known, key=lambda item: item[0], reverse=mode == "max")[:count]

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        if self._best is None:
            return None
        value = metrics.get(self._best[0], math.nan)
        return value if math.isfinite(value) else None
