"""The methods of this package without a Trainer: plain functions on tensors, for anyone's training loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hocket.distributed.dtensors import local, mesh_of, total_norm
from hocket.optim.clipping import clip_gradients

__all__ = [
    "clip_gradients",
    "ema_smoothing",
    "ema_update",
    "sam_perturbation",
    "smooth_labels",
    "soft_cross_entropy",
]


# --- label smoothing


def smooth_labels(logits: Tensor, targets: Tensor, smoothing: float = 0.1, *, ignore_index: int = -100) -> Tensor:
    """Targets mixed with the uniform distribution: ``(1 - smoothing) * target + smoothing / K`` over K classes.

    Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7 (arXiv 1512.00567).

    Args:
        logits: floating point, ``(N, K)`` or ``(N, K, d1, ...)``; only its shape, dtype and device matter.
        targets: class indices, an integer tensor ``(N,)`` or ``(N, d1, ...)``, or probabilities shaped like ``logits``.
        smoothing: the mass given to the uniform distribution, in [0, 1].
        ignore_index: positions with this class index get a row of zeros, which adds nothing to a cross entropy. The
            mean of :func:`torch.nn.functional.cross_entropy` still divides by them; that of :func:`soft_cross_entropy`
            does not.

    Returns:
        A new tensor shaped like ``logits``, in its dtype, or in float32 if that is narrower.

    Raises:
        ValueError: ``smoothing`` is outside [0, 1], the shapes do not fit together, or (checked on the CPU; a device
            raises its own assertion) an index is neither a class nor ``ignore_index``.
        TypeError: ``logits`` are not floating point, or index targets are not integers.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(
            f"smoothing is {smoothing}, but it is a share of the probability mass: give a number in [0, 1]."
        )
    if not logits.is_floating_point() or logits.ndim < 2:
        raise TypeError(
            f"smooth_labels needs floating-point logits of shape (N, K, ...) with the classes in dimension 1, and was "
            f"given {logits.dtype} of shape {tuple(logits.shape)}."
        )
    classes = logits.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.no_grad():
        if targets.shape == logits.shape:
            return targets.to(dtype) * (1 - smoothing) + smoothing / classes
        if targets.shape != logits.shape[:1] + logits.shape[2:]:
            raise ValueError(
                f"Targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}: give class "
                f"indices of shape {tuple(logits.shape[:1] + logits.shape[2:])} or probabilities shaped like the "
                f"logits."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"Targets of shape {tuple(targets.shape)} are class indices for logits of shape "
                f"{tuple(logits.shape)}, but their dtype is {targets.dtype}: convert them with targets.long()."
            )
        ignored = targets == ignore_index
        indices = targets.masked_fill(ignored, 0).long().unsqueeze(1)
        smooth = torch.full(logits.shape, smoothing / classes, dtype=dtype, device=logits.device)
        try:
            smooth.scatter_(1, indices, 1 - smoothing + smoothing / classes)
        except RuntimeError as error:  # on the CPU; a device raises its own assertion, later
            raise ValueError(
                f"Class indices must lie in [0, {classes}) for {classes} classes, or be ignore_index={ignore_index}, "
                f"but they reach from {int(targets.min())} to {int(targets.max())}: pass the ignore_index that your "
                f"labels use."
            ) from error
        return smooth.masked_fill_(ignored.unsqueeze(1), 0)


def soft_cross_entropy(
    logits: Tensor, targets: Tensor, reduction: Literal["mean", "sum", "none"] = "mean", *, ignore_index: int = -100
) -> Tensor:
    """Cross entropy ``-sum_k t_k log softmax(logits)_k`` for class indices, or probabilities of any total mass.

    The mean divides by the total mass of the targets. With index targets that is the number of positions that are not
    ignored, as in :func:`torch.nn.functional.cross_entropy`; with the zero rows that :func:`smooth_labels` makes of
    ignored positions it is the same number.

    Args:
        logits: ``(N, K)`` or ``(N, K, d1, ...)``.
        targets: integer class indices ``(N,)`` or ``(N, d1, ...)``, or probabilities shaped like ``logits``.
        reduction: ``"mean"`` and ``"sum"`` give a scalar, ``"none"`` one loss per position, ``(N,)`` or ``(N, d1,
            ...)``.
        ignore_index: this class index counts as no target; probabilities have no such thing.

    Raises:
        ValueError: an unknown ``reduction``.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: give 'mean', 'sum' or 'none'.")
    if targets.shape != logits.shape:
        return F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignore_index)
    losses = -(targets * F.log_softmax(logits, dim=1)).sum(1)
    if reduction == "none":
        return losses
    return losses.sum() / targets.sum() if reduction == "mean" else losses.sum()


# --- exponential moving average


def ema_smoothing(half_life: float, update_interval: float = 1) -> float:
    """The share of the old average that one update keeps so that a weight's influence halves every ``half_life``.

    ``2 ** -(update_interval / half_life)``, both in the same unit (batches, epochs, samples, tokens).

    Raises:
        ValueError: ``half_life`` is not positive, or ``update_interval`` is negative.
    """
    if not half_life > 0 or not update_interval >= 0:
        raise ValueError(
            f"A half-life of {half_life} with an update every {update_interval} makes no average: give a positive "
            f"half-life and an interval in the same unit."
        )
    return float(2.0 ** -(update_interval / half_life))


def ema_update(averages: Sequence[Tensor], values: Iterable[Tensor], smoothing: float) -> None:
    """Move averages towards values in place: ``average = smoothing * average + (1 - smoothing) * value``.

    Floating-point and complex averages are moved with one fused operation per device and dtype; integer and boolean
    ones, for which a mean has no meaning, become copies of their values. An average may be wider than its value (keep
    averages of half-precision weights in float32: an update is mostly smaller than their rounding). Nothing waits for
    the device.

    Args:
        averages: tensors to change. They must not share memory with each other or with ``values``.
        values: tensors of the same shapes, in the same order; DTensors where the averages are, sharded alike.
        smoothing: the share of the old average that stays, in [0, 1].

    Raises:
        ValueError: ``smoothing`` is outside [0, 1], or the sequences differ in length or in a shape.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(
            f"smoothing is {smoothing}, but it is the share of the old average that stays: give one in [0, 1]."
        )
    values = list(values)
    if len(averages) != len(values):
        raise ValueError(
            f"There are {len(averages)} averages for {len(values)} values: pass as many of one as of the other."
        )
    with torch.no_grad():
        means: list[Tensor] = []
        targets: list[Tensor] = []
        for average, value in zip(averages, values, strict=True):
            if average.shape != value.shape:
                raise ValueError(
                    f"An average of shape {tuple(average.shape)} cannot follow a value of shape {tuple(value.shape)}: "
                    f"pass averages and values in the same order."
                )
            average, value = local(average), local(value)  # element by element, so shards need no more than themselves
            if average.is_floating_point() or average.is_complex():
                means.append(average)
                targets.append(value.to(average.dtype))
            else:
                average.copy_(value)
        if means:
            get_ema_multi_avg_fn(smoothing)(means, targets, 0)  # a lerp: equal tensors stay bitwise equal


# --- sharpness-aware minimisation


def sam_perturbation(gradients: Sequence[Tensor], rho: float = 0.05, epsilon: float = 1e-12) -> list[Tensor]:
    """The step to the worst nearby weights, ``rho * g / (||g||_2 + epsilon)``, with one norm over all gradients.

    Foret et al. 2021, "Sharpness-Aware Minimization", equation 2 with p = 2 (arXiv 2010.01412). Computed on the device,
    without waiting for it. Zero gradients give a zero step. Where ranks hold shards (DTensors), every rank has to call this.

    Args:
        gradients: floating-point tensors of any shapes; left unchanged.
        rho: the length of the whole step, in the units of the weights.
        epsilon: added to the norm.

    Returns:
        New tensors with the shapes, dtypes and devices of ``gradients``.

    Raises:
        ValueError: ``rho`` or ``epsilon`` is negative.
    """
    if rho < 0 or epsilon < 0:
        raise ValueError(f"rho is {rho} and epsilon is {epsilon}, but neither may be negative: rho is a distance.")
    if not gradients:
        return []
    with torch.no_grad():
        # A narrow dtype would overflow in the sum of squares, and its smallest number is far above epsilon.
        norm = total_norm([g if g.dtype.itemsize >= 4 else g.float() for g in gradients])
        scale = rho / (norm + epsilon)
        if len({(g.device, mesh_of(g)) for g in gradients}) == 1:
            return list(torch._foreach_mul(list(gradients), scale))
        return [g * scale.to(g.device) for g in gradients]
