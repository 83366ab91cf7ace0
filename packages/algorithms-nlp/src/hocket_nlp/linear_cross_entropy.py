"""The cross entropy of a linear layer's outputs, computed in chunks of rows, without holding all outputs at once.

Sources: Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, which computes gradients chunk by chunk in the forward pass; Wijmans
et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.errors import Unsupported, WrongValue

#: Logits of a chunk, at least: with fewer, matrix products would be slow.
_SMALLEST_CHUNK = 2**22


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels) + z_loss * logsumexp(logits)²`` without holding all logits.

    The logits of a chunk of rows are computed, their loss and its gradients are added up, and the logits are dropped, all in
    the forward pass (Hsu et al. 2024, section 3.2, arXiv 2410.10989). Backward only multiplies by the gradient of the result.
    Loss and softmax are computed, and gradients of weight and bias summed, in float32, or in float64 for such inputs. Under
    autocast the products are those of autocast's dtype. The z-loss is that of Chowdhery et al. 2022, section 5 (arXiv
    2204.02311).

    On CUDA, where ``liger_kernel`` is installed, its kernel is used, unless there is a z-loss. It allows one
    backward pass only.

    Args:
        hidden: floating point, ``(..., H)``.
        weight: ``(V, H)``.
        labels: integers in [0, V) or ``ignore_index``, of shape ``(...)``: not shifted here.
        bias: ``(V,)`` or None.
        ignore_index: rows with this label do not count.
        z_loss: the coefficient of the squared logarithm of the softmax's denominator.
        reduction: ``"mean"`` over the rows that count, or their ``"sum"``.
        chunk_rows: rows of logits to hold at once; None for as many as take the memory of ``hidden``, or 4 million logits.

    Returns:
        A scalar in float32, or float64 for such inputs. The mean over no row at all is NaN, with gradients of zero.

    Raises:
        ValueError: shapes that do not fit, ``chunk_rows`` below 1, or an unknown ``reduction``; on the CPU, a label
            that is neither a row of the weight nor ``ignore_index`` (a device raises its own assertion).
        NotImplementedError: the weight is a DTensor, as with tensor parallelism; or later, second derivatives.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import linear_cross_entropy
        >>> hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(1000, 4)
        >>> labels = torch.tensor([1, 2, -100, 4, 5, 6])
        >>> loss = linear_cross_entropy(hidden, weight, labels)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
        True
    """
    if reduction not in ("mean", "sum"):
        raise WrongValue(f"reduction is {reduction!r}: give 'mean' or 'sum'.")
    total, _ = summed(hidden, weight, labels, bias, ignore_index=ignore_index, z_loss=z_loss, chunk_rows=chunk_rows)
    return total if reduction == "sum" else mean_of(total, (labels != ignore_index).sum())


def mean_of(total: Tensor, number: Tensor) -> Tensor:
    """Return ``total / number``; for 0 a NaN whose gradient is 0, where that of the division would be NaN."""
    return torch.where(number > 0, total / number.where(number > 0, 1), math.nan)


@torch.compiler.disable
def summed(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `linear_cross_entropy`, and the sum of the z-loss in it, detached."""
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise WrongValue(
            f"Labels of shape {tuple(labels.shape)}, hidden states of shape {tuple(hidden.shape)} and a weight of shape "
            f"{tuple(weight.shape)} do not fit together: give one label for each hidden state, and a weight (V, H)."
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise WrongValue(f"chunk_rows is {chunk_rows}: give the number of rows of logits to hold at once, 1 or more.")
    if hasattr(weight, "device_mesh"):
        raise Unsupported(
            "The weight of the output layer is divided over ranks (a DTensor), and the fused cross entropy needs all of it: do "
            "not divide the output layer by tensor parallelism, or remove fused-cross-entropy. FSDP is supported."
        )
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if not z_loss and hidden.is_cuda and (kernel := _liger()):
        total = kernel(hidden, weight, labels, bias, ignore_index)
        return total, torch.zeros_like(total)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if hidden.dtype is torch.float64:  # which autocast leaves alone
        dtype = hidden.dtype
    rows = chunk_rows or max(hidden.numel(), _SMALLEST_CHUNK) // len(weight) or 1
    total, z_part = _Sum.apply(hidden, weight, bias, labels, ignore_index, z_loss, rows, dtype, torch.is_grad_enabled())
    return total, z_part


class _Sum(torch.autograd.Function):
    """Sum the losses of all rows; compute the gradients of the sum, of those inputs that need one, in the same loop."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        z_loss: float,
        rows: int,
        dtype: torch.dtype,
        differentiated: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and of the z-losses. Products are of ``dtype``, sums wider."""
        wide = torch.promote_types(dtype, torch.float32)
        wanted = [need and differentiated for need in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        total, z_total = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), rows):
                chunk = slice(start, start + rows)
                inputs = hidden[chunk].to(dtype)
                counted = labels[chunk] != ignore_index
                places = labels[chunk].where(counted, 0).unsqueeze(1)
                # One buffer holds in turn the logits, their exponentials and their gradients.
                logits = F.linear(inputs, matrix, offset).to(wide)
                chosen = _chosen(logits, places)
                largest = logits.amax(1)
                exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
                sums = exponentials.sum(1)
                normalizers = largest + sums.log()
                z_losses = (z_loss * normalizers.square()).where(counted, 0).sum()
                total += (normalizers - chosen).where(counted, 0).sum() + z_losses
                z_total += z_losses
                if not any(wanted):
                    continue
                slopes = (1 + 2 * z_loss * normalizers) / sums
                gradients = exponentials.mul_(slopes.where(counted, 0).unsqueeze(1))
                gradients.scatter_add_(1, places, -counted.to(wide).unsqueeze(1))
                if of_bias is not None:
                    of_bias += gradients.sum(0)
                gradients = gradients.to(dtype)
                if of_hidden is not None:
                    of_hidden[chunk] = gradients @ matrix
                if of_weight is None:
                    continue
                if dtype is wide:
                    of_weight.addmm_(gradients.T, inputs)
                else:
                    of_weight += gradients.T @ inputs
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if of_bias is not None and bias is not None:
            of_bias = of_bias.to(bias.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.mark_non_differentiable(z_total)
        return total, z_total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:  # type: ignore[override]
        """Multiply the gradients of the sum; not in place, because backward may be called again."""
        if torch.is_grad_enabled():  # with create_graph=True; they would silently be constants
            raise Unsupported(
                "The gradients of the fused cross entropy cannot be differentiated again, as «create_graph=True» asks for. Use "
                "the cross entropy of the logits instead: remove fused-cross-entropy."
            )
        found = (each if each is None else (each * gradient).to(each.dtype) for each in ctx.saved_tensors)
        return (*found, None, None, None, None, None, None)


def _chosen(logits: Tensor, places: Tensor) -> Tensor:
    """Return the logit of each row's label. Raises ValueError for a label that is no row of the weight."""
    try:
        return logits.gather(1, places).squeeze(1)
    except RuntimeError as error:  # on the CPU; a device raises its own assertion, later
        if "out of bounds" not in str(error):
            raise
        raise WrongValue(
            f"Labels must be in [0, {logits.size(1)}), or be ignore_index, but they range from {int(places.min())} to "
            f"{int(places.max())}: check the tokenizer's vocabulary, and pad labels with -100."
        ) from None


def _liger() -> Any:
    """Return Liger's kernel as a function, or None if it is not installed, or cannot sum in float32."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    kind: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    if "accum_dtype" not in inspect.signature(kind).parameters:
        return None

    def kernel(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
        loss = kind(ignore_index=ignore_index, reduction="sum", accum_dtype=torch.float32)
        total: Tensor = loss(weight, hidden, labels, bias)
        return total.float()

    return kernel
