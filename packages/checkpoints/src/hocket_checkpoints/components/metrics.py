"""The metrics of the training epoch in progress, and the latest values."""

from __future__ import annotations

from typing import Any

from hocket.loop.fit import FitLoop
from hocket.state.component import Check, Component, PerRank, Saved, Tree
from hocket.state.state import State
from hocket.state.watching import label_of, may_log
from hocket_checkpoints.components.generic import Attribute


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


class Metrics(Attribute):
    """The latest values of evaluation sets and train metrics."""

    def __init__(self, state: State) -> None:
        super().__init__("metrics", state.values, "metrics")
        self._state = state

    def load_state_dict(self, saved: Any) -> None:
        """Set them, without those of metrics that their evaluation set no longer has, which would never change again."""
        super().load_state_dict({name: value for name, value in saved.items() if self._lasts(name)})

    def _lasts(self, name: str) -> bool:
        label = label_of(self._state, name)
        if label is None or may_log(self._state):  # of a train metric, or of a set that fit(eval_data=…) may give later
            return True
        metric = name.removeprefix(f"{label}/")
        known = {"loss", *self._state.eval_sets[label].metrics.names}
        return any(metric == each or metric.startswith(f"{each}/") for each in known)
