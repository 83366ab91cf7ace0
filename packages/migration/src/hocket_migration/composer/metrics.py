"""Composer's ``composer.metrics``, as metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hocket_migration.composer.loss import soft_cross_entropy
from hocket_migration.composer.optional_libraries import require

_torchmetrics = require("torchmetrics", "composer.metrics")
Metric: Any = _torchmetrics.Metric


class _Mean(Metric):  # type: ignore[misc]  # torchmetrics may be absent
    """A sum over everything seen, and the number that it is divided by."""

    full_state_update = False

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def add(self, total: Tensor, number: Tensor | float) -> None:
        """Add to the sum and the number."""
        self.total += total.detach().double()
        self.number += number

    def compute(self) -> Tensor:
        """Return the mean."""
        return (self.total / self.number).float()


class CrossEntropy(_Mean):
    """The cross entropy over all targets. Composer averages the means of batches, so its value depends on their sizes.

    Args:
        ignore_index: a class index that does not count.
    """

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Count logits (N, C, …) and class indices, or probabilities."""
        total = soft_cross_entropy(preds, targets, ignore_index=self.ignore_index, reduction="sum")
        soft = targets.shape == preds.shape
        self.add(total, targets.sum().double() if soft else (targets != self.ignore_index).sum())


class LossMetric(_Mean):
    """The mean of a loss function, which is a mean over samples. Composer averages the means of batches.

    Args:
        loss_function: of outputs and targets.
    """

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        self.loss_function = loss_function

    def update(self, preds: Any, targets: Any) -> None:
        """Count a batch."""
        samples = len(targets)
        self.add(self.loss_function(preds, targets) * samples, samples)


class MaskedAccuracy(_Mean):
    """The fraction of right predictions, of logits (…, C), where the target is not ``ignore_index``."""

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch."""
        counted = target != self.ignore_index
        self.add(((preds.argmax(dim=-1) == target) & counted).sum(), counted.sum())


class LanguageCrossEntropy(_Mean):
    """The cross entropy of tokens, of logits (…, C) or a mapping with ``logits``, where the target is not ``ignore_index``."""

    def __init__(self, dist_sync_on_step: bool = False, ignore_index: int = -100) -> None:
        super().__init__(dist_sync_on_step)
        self.ignore_index = ignore_index

    def update(self, output: Mapping[str, Tensor] | Tensor, target: Tensor) -> None:
        """Count a batch."""
        logits = output["logits"] if isinstance(output, Mapping) else output
        flat = target.reshape(-1)
        total = F.cross_entropy(logits.reshape(len(flat), -1), flat, ignore_index=self.ignore_index, reduction="sum")
        self.add(total, (flat != self.ignore_index).sum())


class LanguagePerplexity(LanguageCrossEntropy):
    """The exponential of `LanguageCrossEntropy`."""

    def compute(self) -> Tensor:
        """Return the perplexity."""
        return torch.exp(super().compute())


class BinaryF1Score(Metric):  # type: ignore[misc]  # torchmetrics may be absent
    """The F1 score of two classes, of logits (N, 2)."""

    full_state_update = False

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        for name in ("true_positive", "false_positive", "false_negative"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a batch."""
        chosen, target = output.argmax(dim=1).bool(), target.bool()
        self.true_positive += (chosen & target).sum()
        self.false_positive += (chosen & ~target).sum()
        self.false_negative += (~chosen & target).sum()

    def compute(self) -> Tensor:
        """Return the score, 0 to 1."""
        both: Tensor = 2 * self.true_positive
        return both / (both + self.false_positive + self.false_negative)


class MIoU(Metric):  # type: ignore[misc]  # torchmetrics may be absent
    """The intersection over union of predicted and true classes of pixels, averaged over classes, in percent.

    Args:
        num_classes: the number of classes.
        ignore_index: a class index that does not count.
    """

    full_state_update = False

    def __init__(self, num_classes: int, ignore_index: int = -1) -> None:
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        for name in ("total_intersect", "total_union"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count logits (N, C, H, W) and targets (N, H, W)."""
        counted = targets != self.ignore_index
        chosen, right = logits.argmax(dim=1)[counted], targets[counted]
        count = [torch.bincount(each, minlength=self.num_classes) for each in (chosen[chosen == right], chosen, right)]
        self.total_intersect += count[0]
        self.total_union += count[1] + count[2] - count[0]

    def compute(self) -> Tensor:
        """Return the mean over the classes that occur."""
        seen = self.total_union > 0
        return 100 * (self.total_intersect[seen] / self.total_union[seen]).mean()
