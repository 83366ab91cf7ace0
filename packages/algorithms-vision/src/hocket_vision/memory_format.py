"""The order in which dimensions lie in memory, such as channels-last, which transformed batches keep.

Convolutions compute in the format of their input, so a batch in another format than the loader's trains at another speed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory, as torch keeps them in new tensors.

    Of a dense tensor they reproduce the strides of dimensions of size 1, too: those of ``(B, 1, H, W)`` tell whether it is
    channels-last.

    Example:
        >>> import torch
        >>> from hocket_vision.memory_format import memory_order
        >>> memory_order(torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last))
        [0, 2, 3, 1]
    """
    strides = torch.empty_like(tensor, device="meta").stride()  # of views and expanded tensors, those of a copy
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))


def take_first(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]``, a copy in the memory format of ``tensor``."""
    order = memory_order(tensor)
    taken = tensor.permute(order).index_select(order.index(0), indices)
    return taken.permute([order.index(dim) for dim in range(tensor.dim())])


def in_format_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` if it is dense in the memory format of ``like``, else a copy that is. Their sizes may differ."""
    order = memory_order(like)
    if torch.empty_permuted(tensor.shape, order, device="meta").stride() == tensor.stride():
        return tensor
    return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
