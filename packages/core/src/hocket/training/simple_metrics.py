"""Metrics that the Trainer knows by name: accuracy, mean absolute and mean squared error. torchmetrics has all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor

from hocket.help import names


class Mean:
    """The mean of a value of each element over all batches, in double precision. Subclasses define `values`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.total: float | Tensor = 0.0
        self.number = 0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value of each element."""
        raise NotImplementedError

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        values = self.values(outputs, targets)
        precise = torch.float32 if values.device.type == "mps" else torch.float64
        self.total = self.total + values.sum(dtype=precise)
        self.number += values.numel()

    def compute(self) -> float:
        """Return the mean; NaN without any element."""
        return float(self.total) / self.number if self.number else float("nan")

    def merge_state(self, others: Iterable[Self]) -> None:
        """Add what the metrics of other ranks have seen."""
        for other in others:
            self.total = float(self.total) + float(other.total)
            self.number += other.number


class Accuracy(Mean):
    """The fraction of correct classes: the largest of ``(samples, classes, …)``, or the sign of a binary logit.

    Labels are class indices ``(samples, …)``, or one-hot of the outputs' shape.
    """

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether each label is predicted."""
        if outputs.dim() == 2 and outputs.shape[1] == 1 and targets.dim() == 1:
            outputs = outputs.squeeze(1)
        if targets.is_floating_point() and not ((targets >= 0) & (targets <= 1)).all():
            raise ValueError(
                f"The metric 'accuracy' was given targets of {targets.dtype} from {float(targets.min()):.3g} to "
                f"{float(targets.max()):.3g}, which are not labels. Write metrics='mae' or 'mse' for numbers."
            )
        if outputs.shape == targets.shape and (outputs.dim() < 2 or outputs.shape[1] == 1):
            return (outputs > 0) == (targets > 0.5)
        if outputs.shape == targets.shape:
            targets = targets.argmax(1)
        predicted = outputs.argmax(1) if outputs.dim() > 1 else outputs
        if outputs.dim() < 2 or predicted.shape != targets.shape:
            raise ValueError(
                f"The metric 'accuracy' was given outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}. It takes outputs (samples, classes, …) with labels (samples, …), or logits and "
                "labels of one shape. Write another metric, such as metrics={'accuracy': "
                "torchmetrics.classification.MulticlassAccuracy(10)}."
            )
        return predicted == targets


class MeanAbsoluteError(Mean):
    """The mean of the absolute differences."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute differences."""
        return _difference(outputs, targets, "mae").abs()


class MeanSquaredError(Mean):
    """The mean of the squared differences."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared differences."""
        return _difference(outputs, targets, "mse").square()


def _difference(outputs: Tensor, targets: Tensor, name: str) -> Tensor:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"The metric '{name}' was given outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}. They should have one shape; write outputs.squeeze(1) in the model, or "
            "targets.unsqueeze(1) in the data."
        )
    return outputs - targets


METRICS: Mapping[str, type[Mean]] = {"accuracy": Accuracy, "mae": MeanAbsoluteError, "mse": MeanSquaredError}
_OTHERS = {
    "accuracy": "accuracy acc top1 top1accuracy accuracyscore sparsecategoricalaccuracy categoricalaccuracy binaryaccuracy",
    "mae": "mae meanabsoluteerror l1",
    "mse": "mse meansquarederror l2",
}


def find(name: str) -> str | None:
    """Return the name in `METRICS` that another library's name of a metric means, or None."""
    return next((ours for ours, others in _OTHERS.items() if names.plain(name) in others.split()), None)
