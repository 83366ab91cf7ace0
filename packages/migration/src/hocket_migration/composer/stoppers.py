"""Composer's callbacks that end a run by the value of a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongValue
from hocket_migration.composer.core.callback import Callback
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Time, Timestamp, TimeUnit

Comparison = str | Callable[[Any, Any], Any] | None


class _Stopper(Callback):
    """Look at a metric after each evaluation of its set, or after each epoch of training."""

    def __init__(self, monitor: str, dataloader_label: str, comp: Comparison) -> None:
        self.monitor, self.dataloader_label = monitor, dataloader_label
        if comp is None:
            comp = "less" if any(each in monitor.lower() for each in ("loss", "error", "perplexity")) else "greater"
        names = {"less": torch.less, "lt": torch.less, "greater": torch.greater, "gt": torch.greater}
        if isinstance(comp, str) and comp.lower() not in names:
            raise WrongValue(f"{type(self).__name__} was given comp={comp!r}. Write comp='greater' or comp='less'.")
        self.comp_func = names[comp.lower()] if isinstance(comp, str) else comp

    def look(self, value: Tensor, state: State) -> None:
        """Act on a value."""
        raise NotImplementedError

    def _look(self, state: State) -> None:
        if state.dataloader_label != self.dataloader_label:
            return
        label, name = self.dataloader_label, self.monitor
        metrics = state.train_metrics if label == "train" else state.eval_metrics[label]
        if name not in metrics:
            raise WrongValue(
                f"{type(self).__name__} monitors {name!r}, which {label!r} does not have. Its metrics are: "
                f"{', '.join(metrics) or 'none'}."
            )
        value = state.hocket.metrics[f"{label}/{name}"] if label != "train" else metrics[name].compute()
        self.look(torch.as_tensor(value), state)

    def fit_start(self, state: State, logger: Any) -> None:
        """Check the label. Raises ValueError if there is no such set."""
        labels = ["train", *(each.label for each in state.evaluators)]
        if self.dataloader_label not in labels:
            raise WrongValue(
                f"{type(self).__name__} was given dataloader_label={self.dataloader_label!r}, and there are "
                f"{', '.join(map(repr, labels))}."
            )

    def eval_end(self, state: State, logger: Any) -> None:
        """Look at a metric of the evaluation set."""
        self._look(state)

    def epoch_end(self, state: State, logger: Any) -> None:
        """Look at a metric of training."""
        self._look(state)


class ThresholdStopper(_Stopper):
    """End the run when a metric is beyond a threshold.

    Args:
        monitor: the name of the metric.
        dataloader_label: its evaluation set, or ``"train"``.
        threshold: the value.
        comp: a function of value and threshold, ``"greater"`` or ``"less"``; None for less if the name has loss, error or
            perplexity, and else for greater.
        stop_on_batch: look at a metric of training after each batch.

    Example:
        >>> from hocket_migration.composer.callbacks import ThresholdStopper
        >>> stopper = ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.9)
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: Comparison = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        self.threshold, self.stop_on_batch = torch.tensor(threshold), stop_on_batch

    def look(self, value: Tensor, state: State) -> None:
        """Compare a value with the threshold."""
        if self.comp_func(value, self.threshold):
            state.stop_training()

    def batch_end(self, state: State, logger: Any) -> None:
        """Look at a metric of training, if asked to."""
        if self.stop_on_batch:
            self._look(state)


class EarlyStopper(_Stopper):
    """End the run when a metric has not become better for a number of epochs or batches. The weights stay the last ones.

    Args:
        monitor: the name of the metric.
        dataloader_label: its evaluation set, or ``"train"``.
        comp: a function of a value and the best one, ``"greater"`` or ``"less"``; None for less if the name has loss, error or
            perplexity, and else for greater.
        min_delta: by how much a value has to be better.
        patience: a number of epochs, or a time in ``ep`` or ``ba``. The run ends once more than that has passed.

    Example:
        >>> from hocket_migration.composer.callbacks import EarlyStopper
        >>> stopper = EarlyStopper("CrossEntropy", "eval", comp="less", patience="2ep")
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: Comparison = None,
        min_delta: float = 0.0,
        patience: int | str | Time = 1,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        self.min_delta, self.patience = abs(min_delta), Time.from_input(patience, "ep")
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise WrongValue(f"EarlyStopper was given patience='{self.patience}'. Write '3ep' or '100ba'.")
        self.best: Tensor | None = None
        self.best_occurred: Any = None

    def look(self, value: Tensor, state: State) -> None:
        """Compare a value with the best one, and count the time since then."""
        better = self.best is None or (
            bool(self.comp_func(value, self.best)) and bool(abs(value - self.best) > self.min_delta)
        )
        if better:
            self.best, self.best_occurred = value, state.timestamp
        unit = self.patience.unit
        if state.timestamp.get(unit) - self.best_occurred.get(unit) > self.patience:
            state.stop_training()

    def batch_end(self, state: State, logger: Any) -> None:
        """Look at a metric of training, if the patience is a number of batches."""
        if self.patience.unit is TimeUnit.BATCH:
            self._look(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and when it was."""
        now = None if self.best_occurred is None else (int(self.best_occurred.epoch), int(self.best_occurred.batch))
        return {"best": self.best, "best_occurred": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from them."""
        self.best, now = state["best"], state["best_occurred"]
        self.best_occurred = None if now is None else Timestamp(epoch=now[0], batch=now[1])
