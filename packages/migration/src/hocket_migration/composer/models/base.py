"""Composer's interface of models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hocket.errors import Unsupported


class ComposerModel(nn.Module):
    """Base of models with Composer's interface: they define their outputs, their loss and their metrics for a batch.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import ComposerModel
        >>> class Regression(ComposerModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = torch.nn.Linear(4, 1)
        ...     def forward(self, batch):
        ...         inputs, _ = batch
        ...         return self.line(inputs)
        ...     def loss(self, outputs, batch):
        ...         _, targets = batch
        ...         return torch.nn.functional.mse_loss(outputs, targets)
    """

    #: What the model may log with, once there is a Trainer.
    logger: Any = None

    def forward(self, batch: Any) -> Any:
        """Return the outputs for a batch."""
        raise Unsupported(f"{type(self).__name__} needs a forward(batch), which returns the outputs for a batch.")

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        """Return the loss: a mean over samples, or several losses in a sequence or by name, which are added up."""
        raise Unsupported(f"{type(self).__name__} needs a loss(outputs, batch), which returns a scalar tensor.")

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for metrics; by default those of `forward`."""
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return metrics of torchmetrics by name, for training or for evaluation."""
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Update a metric with a batch."""
        raise Unsupported(
            f"{type(self).__name__} has metrics and no update_metric(batch, outputs, metric). Define it; for batches of inputs "
            "and targets it calls metric.update(outputs, batch[1])."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "logger"}
