"""Keep the latest checkpoints of a run and the best by a metric, and prune the others after each complete write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hocket.basics.direction import check_mode, mode_of
from hocket.errors import CheckpointError, WrongType, WrongValue
from hocket.help import warn
from hocket_checkpoints.ownership import Ownership
from hocket_checkpoints.ranking import finite, ranked
from hocket_checkpoints.storage.store import Store


class Retention:
    """Keep the latest ``keep`` checkpoints, one a batch (None: all), and the best: ``(metric, "max" | "min", how many)``."""

    def __init__(self, keep: int | None, best: tuple[str, Literal["max", "min"], int] | None) -> None:
        if keep is not None and (not isinstance(keep, int) or keep is True):
            raise WrongType(f"«keep={keep!r}» is not a number of checkpoints. Write «keep=3», or «None» for all.")
        if keep is not None and keep < 1:
            raise WrongValue(f"«keep={keep}» keeps nothing to resume from; give 1 or more, or «None» for all.")
        if isinstance(best, str):
            mode = mode_of(best)
            raise WrongValue(
                f"«best={best!r}» does not say how many checkpoints. Write «best=({best!r}, '{mode or 'max'}', 1)»"
                + ("." if mode else ", with 'min' if lower is better.")
            )
        of_three = best is None or (isinstance(best, tuple | list) and len(best) == 3 and isinstance(best[2], int))
        if best is not None and (not of_three or best[1] not in ("max", "min") or best[2] < 1):
            raise WrongValue(
                f"«best={best!r}» is not (metric, 'max' or 'min', number of checkpoints). Write «best=('test/accuracy', 'max', "
                "1)»."
            )
        if best is not None:
            check_mode(best[0], best[1], lambda mode: f"«best=({best[0]!r}, {mode!r}, {best[2]})»")
        self._keep, self._best = keep, best

    @property
    def metric(self) -> str | None:
        """The metric that ranks checkpoints, or None."""
        return None if self._best is None else self._best[0]

    @property
    def rule(self) -> tuple[str, str] | None:
        """The metric that ranks checkpoints, and ``"max"`` or ``"min"``."""
        return None if self._best is None else self._best[:2]

    def leads(self, metrics: Mapping[str, float], owned: Ownership) -> bool:
        """Whether a checkpoint with these metrics would be among the best."""
        if self._best is None or (value := self._value(metrics)) is None:
            return False
        _, mode, count = self._best
        kept = self.ranking(owned.own())
        if len(kept) < count:
            return True
        worst = kept[-1][0]
        return value > worst if mode == "max" else value < worst

    def prune(self, store: Store, owned: Ownership) -> None:
        """Remove the run's checkpoints that are neither among the latest nor among the best.

        Of several after one batch, such as that of an interval and that of the epoch, the later one stands for both.

        Called after each complete write, on the rank and in the thread that wrote (`hocket_checkpoints.writing`), and never
        otherwise. A checkpoint that cannot be removed is a warning, and is tried again after the next write.
        """
        there = owned.own()
        latest = list({name.partition("-")[2]: name for name in there}.values())  # by the batch in the name
        kept = {*latest[-(self._keep or 0) :], *(name for _, name in self.ranking(there))}
        for name in there:
            if name not in kept:
                try:
                    store.remove(name)
                except (CheckpointError, OSError) as error:
                    warn(f"An old checkpoint stays: {error}", RuntimeWarning)

    def ranking(self, abouts: Mapping[str, Mapping[str, Any]]) -> list[tuple[float, str]]:
        """Return values and names of the best checkpoints, the best first."""
        if self._best is None:
            return []
        metric, mode, count = self._best
        return ranked(abouts, metric, mode)[:count]

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        return None if self._best is None else finite(metrics.get(self._best[0]))
