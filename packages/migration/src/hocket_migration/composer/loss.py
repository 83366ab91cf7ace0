"""Composer's ``composer.loss``: losses that take class indices or class probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hocket.errors import WrongValue


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of class indices (N, d1, …), or of class probabilities (N, C, d1, …).

    For probabilities, a mean is the sum divided by the sum of all probabilities, so that samples without any do not count.

    Args:
        input: logits (N, C, d1, …).
        target: class indices, or probabilities in the shape of ``input``.
        weight: factors of the classes (C).
        ignore_index: a class index that does not count; not for probabilities.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        ValueError: the reduction is unknown.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.loss import soft_cross_entropy
        >>> round(soft_cross_entropy(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[0.8, 0.1, 0.1]])).item(), 5)
        0.63954
    """
    if reduction not in ("mean", "sum", "none"):
        raise WrongValue(f"reduction={reduction!r} is neither 'mean', 'sum' nor 'none'.")
    if target.shape != input.shape:
        return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    each = -target * F.log_softmax(input, dim=1)
    if weight is not None:
        each = each * weight.reshape(1, -1, *[1] * (each.dim() - 2))
    losses = each.sum(dim=1)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / target.sum()


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool | None = True,
) -> Tensor:
    """Binary cross entropy of logits, for class indices (N) or probabilities in the shape of the logits (N, C).

    Args:
        input: logits.
        target: indices or probabilities.
        weight, pos_weight, reduction: as in torch's function of this name.
        scale_by_batch_size: divide by the number of samples.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.loss import binary_cross_entropy_with_logits
        >>> binary_cross_entropy_with_logits(torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor(1.3863)
    """
    if target.shape != input.shape:
        target = F.one_hot(target, input.shape[1]).movedim(-1, 1)
    loss = F.binary_cross_entropy_with_logits(
        input, target.to(input.dtype), weight, reduction=reduction, pos_weight=pos_weight
    )
    return loss / input.shape[0] if scale_by_batch_size else loss


#: The losses by name.
loss_registry: dict[str, Callable[..., Any]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}
