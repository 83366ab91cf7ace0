"""Metrics that the Trainer knows by name: accuracy, mean absolute and mean squared error. torchmetrics has all others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.basics.losses import classes
from hocket.errors import WrongValue
from hocket.help import names, warn

#: Losses of torch with several binary labels, which take logits.
_OF_LOGITS = (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss)


#: Losses of torch whose targets are numbers.
_OF_NUMBERS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


class Mean:
    """The mean of a value of each element over all batches, in double precision. Subclasses define `values`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.total: float | Tensor = 0.0
        self.number: float | Tensor = 0

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
        return float(self.total) / float(self.number) if self.number else float("nan")

    def merge_state(self, others: Iterable[Self]) -> None:
        """Add what the metrics of other ranks have seen."""
        for other in others:
            self.total = float(self.total) + float(other.total)
            self.number += other.number


class Accuracy(Mean):
    """The fraction of correct labels: class indices ``(samples, …)``, or labels of the outputs' shape.

    The latter are binary (one column), one-hot, or several for each sample, of which each counts. `follow` says how the loss
    reads outputs and labels. Sums and flags stay on the device until `compute`.
    """

    #: A binary output above this is positive: 0.5 for probabilities, 0 for logits; None if the loss does not say.
    cut: float | None = None
    #: The label that does not count.
    ignored = -100

    def follow(self, loss: object) -> None:
        """Read outputs and labels as a loss function of torch does; others leave it as it is."""
        if (declared := classes(loss)) is not None:
            self.ignored = declared[1]
        function = loss.func if isinstance(loss, functools.partial) else loss
        if function in _OF_NUMBERS or isinstance(function, nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss):
            name = getattr(function, "__name__", type(function).__name__)
            raise WrongValue(
                f"The metric 'accuracy' counts right labels, and the loss {name} is of numbers. Write «metrics='mae'» or 'mse'."
            )
        if function is F.binary_cross_entropy or isinstance(function, nn.BCELoss):
            self.cut = 0.5
        elif function in _OF_LOGITS or isinstance(function, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss):
            self.cut = 0.0

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        #: Correct elements, and their number, of labels of the outputs' shape.
        self.elements: float | Tensor = 0.0
        self.element_number: int | Tensor = 0
        #: Whether there was: a sample with several labels or none; a label without a class; binary labels; an output
        #: outside [0, 1] for one.
        self.several: bool | Tensor = False
        #: Whether targets of a floating dtype were no labels; and the shape of several labels for each sample.
        self.numbers: bool | Tensor = False
        self.shape: tuple[int, ...] = ()
        self.unknown: bool | Tensor = False
        self.binary: bool | Tensor = False
        self.logits: bool | Tensor = False

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        if outputs.dim() == 2 and outputs.shape[1] == 1 and targets.dim() == 1:
            outputs = outputs.squeeze(1)
        if targets.is_floating_point():
            self.numbers = self.numbers | ~((targets >= 0) & (targets <= 1)).all()
            if targets.is_cpu:  # elsewhere `compute` does not make the host wait in every batch
                self._refuse_numbers()
        counts = targets != self.ignored
        if outputs.shape == targets.shape and (outputs.dim() < 2 or outputs.shape[1] == 1):
            self.binary = True
            self.logits = self.logits | ((outputs < 0) | (outputs > 1)).any()
            self._add((outputs > (self.cut or 0)) == (targets > 0.5), counts)
            return
        if outputs.shape == targets.shape:
            self._see_several(targets.where(counts, 0).sum(1, dtype=torch.float32), outputs.shape)
            if self.cut is not None:
                right = ((outputs > self.cut) == (targets > 0.5)) & counts
                self.elements, self.element_number = self.elements + right.sum(), self.element_number + counts.sum()
            targets, counts = targets.float().argmax(1), counts.any(1)
        predicted = outputs.argmax(1) if outputs.dim() > 1 else outputs
        if outputs.dim() < 2 or predicted.shape != targets.shape:
            raise WrongValue(
                f"The metric 'accuracy' was given outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}. It takes outputs (samples, classes, …) with labels (samples, …), or logits and "
                "labels of one shape. Write another metric, such as metrics={'accuracy': "
                "torchmetrics.classification.MulticlassAccuracy(10)}."
            )
        self.unknown = self.unknown | (counts & ((targets < 0) | (targets >= outputs.shape[1]))).any()
        self._add(predicted == targets, counts)

    def _add(self, right: Tensor, counts: Tensor) -> None:
        self.total, self.number = self.total + (right & counts).sum(), self.number + counts.sum()

    def _see_several(self, sums: Tensor, shape: torch.Size) -> None:
        self.several, self.shape = self.several | ((sums - 1).abs() > 0.01).any(), tuple(shape)
        if sums.is_cpu:
            self._refuse_several()

    def _refuse_numbers(self) -> None:
        if self.numbers:
            raise WrongValue(
                "The metric 'accuracy' was given targets of a floating-point dtype, some of them outside of 0 to 1, which are "
                "not labels. Write «metrics='mae'» or 'mse' for numbers."
            )

    def _refuse_several(self) -> None:
        if self.cut is None and self.several:
            raise WrongValue(
                f"The metric 'accuracy' was given outputs and targets of shape {self.shape}, and the labels of a sample do "
                "not add up to 1: a sample has several labels or none, and the loss does not say whether outputs are logits or "
                "probabilities. Pass «loss='binary_cross_entropy_with_logits'» to the Trainer, or write metrics={'accuracy': "
                f"torchmetrics.classification.MultilabelAccuracy({self.shape[1]}, average='micro')}}."
            )

    def compute(self) -> float:
        """Return the fraction; NaN without any label that counts."""
        self._refuse_numbers()
        self._refuse_several()
        if self.unknown:
            raise WrongValue(
                f"The metric 'accuracy' was given labels that are neither a class of the outputs nor {self.ignored}, which is "
                "ignored. Pass loss=torch.nn.CrossEntropyLoss(ignore_index=…) to the Trainer, or write metrics={'accuracy': "
                "torchmetrics.classification.MulticlassAccuracy(10, average='micro', ignore_index=…)}."
            )
        if self.binary and self.cut is None and not self.logits:
            warn(
                "The metric 'accuracy' reads binary outputs as logits, which are positive above 0, but these are all from 0 to "
                "1, as probabilities are. For those pass «loss='binary_cross_entropy'» to the Trainer, or write "
                "«metrics={'accuracy': torchmetrics.classification.BinaryAccuracy(threshold=0.5)}»."
            )
        if self.several:
            return float(self.elements) / float(self.element_number)
        return super().compute()

    def merge_state(self, others: Iterable[Self]) -> None:
        """Add what the metrics of other ranks have seen."""
        for other in others:
            for name in ("total", "number", "elements", "element_number"):
                setattr(self, name, float(getattr(self, name)) + float(getattr(other, name)))
            for name in ("several", "unknown", "binary", "logits", "numbers"):
                setattr(self, name, bool(getattr(self, name)) or bool(getattr(other, name)))
            self.shape = self.shape or other.shape


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
        raise WrongValue(
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
    return next((metric for metric, others in _OTHERS.items() if names.plain(name) in others.split()), None)
