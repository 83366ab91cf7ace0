"""Composer's classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket_migration.composer.loss import soft_cross_entropy
from hocket_migration.composer.models.base import ComposerModel
from hocket_migration.composer.optional_libraries import require


class ComposerClassifier(ComposerModel):
    """A classifier: a module of inputs that returns logits, for batches of inputs and targets.

    Args:
        module: the network.
        num_classes: the number of classes; None for ``module.num_classes``.
        train_metrics: a metric or collection of torchmetrics; None for the accuracy.
        val_metrics: the same for evaluation; None for cross entropy and accuracy.
        loss_fn: of logits and targets.

    Raises:
        ValueError: the number of classes is needed, and unknown.
        ModuleNotFoundError: torchmetrics is not installed.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(8, 10), num_classes=10)
        >>> list(model.get_metrics(is_train=False))
        ['CrossEntropy', 'MulticlassAccuracy']
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Any = None,
        val_metrics: Any = None,
        loss_fn: Callable[..., Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self._loss_fn = loss_fn
        self.num_classes = getattr(module, "num_classes", num_classes)
        if self.num_classes is None and (train_metrics is None or val_metrics is None):
            raise WrongValue(
                "ComposerClassifier needs the number of classes for its metrics. Pass num_classes=10 or the like, or both "
                "train_metrics= and val_metrics=."
            )
        self.train_metrics = self._accuracy() if train_metrics is None else train_metrics
        self.val_metrics = self._both() if val_metrics is None else val_metrics

    def _accuracy(self) -> Any:
        classification = require("torchmetrics.classification", "ComposerClassifier")
        return classification.MulticlassAccuracy(num_classes=self.num_classes, average="micro")

    def _both(self) -> Any:
        from hocket_migration.composer.metrics import CrossEntropy

        return require("torchmetrics", "ComposerClassifier").MetricCollection([CrossEntropy(), self._accuracy()])

    def forward(self, batch: Any) -> Any:
        """Return the logits for the inputs of a batch."""
        inputs, _ = batch
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of logits and targets."""
        _, targets = batch
        return self._loss_fn(outputs, targets, *args, **kwargs)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return the metrics by the names of their classes."""
        metrics = self.train_metrics if is_train else self.val_metrics
        if isinstance(metrics, require("torchmetrics", "ComposerClassifier").Metric):
            return {type(metrics).__name__: metrics}
        return dict(metrics.items())

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Update a metric with logits and targets."""
        _, targets = batch
        metric.update(outputs, targets)
