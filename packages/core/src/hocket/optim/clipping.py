"""Gradient clipping: by global norm, by value, and adaptively by the norm of each unit's weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from hocket.basics import fast_paths
from hocket.basics.dtensors import by_mesh, total_norm, uniform
from hocket.errors import WrongValue


@torch.no_grad()
def clip_gradients(
    parameters: Tensor | Iterable[Tensor],
    kind: Literal["norm", "value", "adaptive"],
    threshold: float,
    *,
    floor: float = 1e-3,
) -> Tensor | None:
    """Clip the gradients of ``parameters`` in place, without waiting for the device.

    Sharded gradients (DTensors, over one mesh or several) are clipped as the full ones would be; then every rank has to call
    this.

    Args:
        parameters: those without a gradient are skipped.
        kind: ``"norm"`` scales all gradients together so that their joint 2-norm is at most ``threshold`` (Pascanu et
            al. 2013, algorithm 1, arXiv 1211.5063). ``"value"`` clamps each element to ``[-threshold, threshold]``.
            ``"adaptive"`` scales the gradient G of each unit to a norm of at most ``threshold * max(||W||, floor)``, W
            the weights of the unit (Brock et al. 2021, eq. 3, arXiv 2102.06171). A unit is one index of dimension 0,
            that is an output feature or filter of torch's layers; a bias, gain or scalar is one unit. The paper does
            not clip the last linear layer: omit it from ``parameters`` to do the same.
        threshold: positive; for ``"adaptive"`` something like 0.01 at large batches up to 0.16 at small ones. With
            infinity, ``"norm"`` only measures.
        floor: for ``"adaptive"``, a lower bound of the norm of a unit's weights, so that units that begin at zero can
            learn.

    Returns:
        For ``"norm"`` the joint norm before clipping, a scalar tensor on the device of the gradients; else None. A
        non-finite norm makes the gradients non-finite; the caller has to check for that.

    Raises:
        ValueError: ``kind`` is not one of the three, or ``threshold`` or ``floor`` is not positive.

    Example:
        >>> import torch
        >>> from hocket_general.functional import clip_gradients
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_gradients([weight], "norm", 1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if isinstance(threshold, str) or not threshold > 0 or not floor > 0 or math.isinf(floor):
        raise WrongValue(
            f"Gradients cannot be clipped with «threshold={threshold!r}» and «floor={floor}»: give positive numbers, such as "
            "«norm=1.0», or clip_gradients(parameters, 'norm', 1.0)."
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if kind == "norm":
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        if uniform(gradients):
            fast_paths.scale(gradients, (threshold / (norm + 1e-6)).clamp(max=1.0))
            return norm
        for group in by_mesh(parameters):
            clip_grads_with_norm_(group, threshold, norm)
        return norm
    if kind == "value":
        for group in by_mesh(parameters):
            clip_grad_value_(group, threshold)
    elif kind == "adaptive":
        for parameter in parameters:
            if parameter.grad is not None:
                limit = _unit_norms(parameter).clamp_min(floor).mul_(threshold)
                # limit / max(norm, limit) is min(1, limit / norm) without a division by zero.
                scale = limit / torch.maximum(_unit_norms(parameter.grad), limit)
                parameter.grad.mul_(scale)  # the scale of a half-precision gradient may need single precision
    else:
        raise WrongValue(f"There is no clipping by {kind!r}; the kinds are 'norm', 'value' and 'adaptive'.")
    return None


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the 2-norms over all dimensions but the first, kept as size 1; for vectors and scalars the norm of all."""
    dimensions = list(range(1, tensor.ndim)) or None
    # Low-precision formats overflow or underflow when squared; float32 and float64 keep their precision.
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dimensions, keepdim=dimensions is not None, dtype=dtype)
    return norms
