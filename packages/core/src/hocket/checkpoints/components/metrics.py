"""The metrics of the training epoch in progress."""

from __future__ import annotations

from hocket.checkpoints.component import Check, Component, PerRank, Saved, Tree
from hocket.training.fit import FitLoop


class TrainMetrics(Component):
    """Each metric's state on this rank; with another world size each saved state is merged into that of one rank."""

    path, scope = "train_metrics", "rank"

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop

    def state_dict(self, gather: bool) -> Tree:
        """Return the states by the metric's name."""
        return self._loop.metrics.state_dict()

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        """Compare the names of the metrics."""
        problem = self._loop.metrics.misfit(saved.states[0])
        if problem:
            return Check(problems=[problem] if checkpoint.strict else [])
        return Check(saved)

    def load_state_dict(self, saved: PerRank | None) -> None:
        """Merge the states assigned to this rank; None leaves the metrics as they are."""
        if saved is not None:
            self._loop.metrics.load_state_dicts(saved.dealt)
