"""Know which metrics were measured since the last checkpoint could be written, among them the one that ranks checkpoints."""

from __future__ import annotations

import math

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.state.state import State
from hocket.state.watching import label_of, warn_of_nothing, watch

#: The key of the watched value; see `hocket.state.watching`.
_WATCHES = "checkpoints"
#: What messages call it.
_WHO = "Checkpoints(best=)"


class Measured:
    """Where metrics were measured, by epoch and batch.

    Args:
        metric: ranks checkpoints; None for none. Its evaluation set measures it, or a plug-in logs it with ``state.log``: then
            its value is taken after each evaluation and each epoch in which it was logged.
    """

    def __init__(self, metric: str | None) -> None:
        self._metric = metric
        #: The latest evaluation, by the set's label.
        self.evaluated: dict[str, tuple[int, int]] = {}
        #: The value that was logged, by name, and where it was taken.
        self._logged: dict[str, float] = {}
        self._logged_at: tuple[int, int] | None = None
        self._warned = False

    def fit_start(self, state: State) -> None:
        """Watch what is logged. Raises ValueError for the metric of a set that does not exist."""
        if self._metric is not None:
            watch(state, _WHO, _WATCHES, self._metric)

    def eval_end(self, state: State) -> None:
        """Note the evaluation of a set."""
        assert state.eval_label is not None
        self.evaluated[state.eval_label] = _place(state)

    def values(self, state: State) -> dict[str, float]:
        """Return the latest values of all metrics by name."""
        return {**state.metrics, **self._logged}

    def is_new(self, state: State, name: str) -> bool:
        """Whether a metric was measured right here: by its set's evaluation or, for one without a set, by any evaluation."""
        if name in self._logged:
            return self._logged_at == _place(state)
        evaluated = [label for label, place in self.evaluated.items() if place == _place(state)]
        label = label_of(state, name)
        return (bool(evaluated) and name in state.metrics) if label is None else label in evaluated

    def ranks(self, state: State, epoch_ends: bool) -> bool:
        """Whether there is a new value that ranks checkpoints. All ranks call this. Raises ValueError for an unknown one."""
        if self._metric is None:
            return False
        self._take_logged(state, self._metric, epoch_ends)
        if not self.is_new(state, self._metric):
            return False
        self.check(state)
        value = self.values(state).get(self._metric, 0.0)
        if not math.isfinite(value) and not self._warned:
            self._warned = True
            warn(
                f"{self._metric} is {value}, which ranks no checkpoint, so none is kept as the best. Look for NaN in the "
                "evaluation data, or lower the learning rate."
            )
        return True

    def check(self, state: State) -> None:
        """Raise ValueError if an evaluation that should have measured the metric did not."""
        name = self._metric
        if name is None or name in self.values(state):
            return
        if self.is_new(state, name):
            metrics = ", ".join(sorted(state.metrics)) or "none"
            raise WrongValue(
                f"Checkpoints should keep the best by '{name}', but there is no such metric. There are: {metrics}.",
                about="best",
            )

    def _take_logged(self, state: State, name: str, epoch_ends: bool) -> None:
        """Take the value that was logged since the last evaluation or epoch."""
        if name in state.metrics or not (epoch_ends or _place(state) in self.evaluated.values()):
            return
        if (value := state.watched.take(state, _WATCHES)) is not None:
            self._logged, self._logged_at = {name: value}, _place(state)
        elif epoch_ends and not self._logged and not self._warned and label_of(state, name) is None:
            self._warned = True
            warn_of_nothing(state, _WHO, name)


def _place(state: State) -> tuple[int, int]:
    return state.timestamp.epoch, state.timestamp.batch
