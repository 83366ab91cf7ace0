"""Many tensors as few: one collective for all tensors of a dtype and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


def packed(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """One flat copy per dtype and device, and the tensors it holds, in order. Empty tensors are left out."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        yield torch.cat([tensor.detach().reshape(-1) for tensor in alike]), alike


@torch.no_grad()
def unpack(flat: Tensor, alike: Sequence[Tensor]) -> None:
    """Copy the values of ``flat`` back into the tensors, in place."""
    for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
        tensor.copy_(values.view_as(tensor))
