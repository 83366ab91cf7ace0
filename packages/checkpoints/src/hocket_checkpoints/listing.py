"""The checkpoints that a run has written: the best, the latest, and a line about them."""

from __future__ import annotations

from hocket.basics.direction import mode_of
from hocket.errors import CheckpointError
from hocket.run.result import Best
from hocket_checkpoints.ownership import Ownership
from hocket_checkpoints.retention import Retention
from hocket_checkpoints.storage.store import Store


class Listing:
    """The existing checkpoints of this run. Only rank 0, which writes them, may call the methods.

    Every call reads the store, and raises CheckpointError if that fails.

    Args:
        resumable: whether a run can resume from them; they hold more than weights.
    """

    def __init__(self, store: Store, owned: Ownership, retention: Retention, resumable: bool) -> None:
        self.store, self.resumable = store, resumable
        self._owned, self._retention = owned, retention

    @property
    def rule(self) -> tuple[str, str] | None:
        """The metric that ranks checkpoints, and ``"max"`` or ``"min"``; None if they are not ranked."""
        return self._retention.rule

    def best(self) -> Best | None:
        """Return the checkpoint with the best metric, or None if the run has not kept a best one."""
        ranking = [] if self._retention.metric is None else self._retention.ranking(self._owned.own())
        return Best(self._path(ranking[0][1]), str(self._retention.metric), ranking[0][0]) if ranking else None

    def path_of(self, which: str) -> str:
        """Return the path or URL of the ``"best"`` or ``"latest"`` checkpoint. Raises CheckpointError if it does not exist."""
        metric = self._retention.metric
        if which == "best" and metric is None:
            abouts = [each for each in self._owned.own().values() if each.get("evaluated")]
            ranks_by = abouts[-1]["evaluated"][0] if abouts else "test/loss"
            rule = (ranks_by, mode_of(ranks_by) or "max", 1)
            how = "To rank them, write" if abouts else "They follow no evaluation. For a run that ranks its own, write"
            raise CheckpointError(
                f"The checkpoints in {self.store} are not ranked. {how} «checkpoints=hocket.Checkpoints("
                f"{str(self.store.folder)!r}, best={rule})¦checkpoints={{'folder': {str(self.store.folder)!r}, 'best': "
                f"{rule}}}»; or give 'latest', or the path of a checkpoint."
            )
        found = self.best() if which == "best" else None
        if found is not None:
            return found.path
        names = [] if which == "best" else list(self._owned.own())
        if not names:
            ranked = f" ranked by '{metric}'" if which == "best" else ""
            raise CheckpointError(
                f"This run has no checkpoint{ranked} in {self.store} yet. Train first: «trainer.fit()¦`hocket train`»."
            )
        return self._path(names[-1])

    def summary(self) -> str:
        """Return a few words, such as ``3 checkpoints in runs/a, the newest is ep3-ba18``; empty if there are none."""
        names = list(self._owned.own())
        if not names:
            return ""
        best = self.best()
        how_many = "1 checkpoint" if len(names) == 1 else f"{len(names)} checkpoints"
        said = f"{how_many} in {self.store.folder}, the newest is {names[-1]}"
        if best is not None:
            said += f", the best {best.path.rpartition('/')[2]} ({best.metric} {best.value:.4g})"
        return said

    def _path(self, name: str) -> str:
        return f"{str(self.store.folder).rstrip('/')}/{name}"
