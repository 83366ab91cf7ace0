"""Pack tensors, for one collective per dtype and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


def packed(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield one flat copy per dtype and device, and the tensors in it, in order. Empty tensors are skipped."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in kinds.values():
        yield torch.cat([tensor.detach().reshape(-1) for tensor in group]), group


@torch.no_grad()
def unpack(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy the values of ``flat`` back into the tensors, in place."""
    for tensor, values in zip(into, flat.split([tensor.numel() for tensor in into]), strict=True):
        tensor.copy_(values.view_as(tensor))
