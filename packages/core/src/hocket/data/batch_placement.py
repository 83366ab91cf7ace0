"""Move a batch to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hocket.data.nesting import map_nested

if TYPE_CHECKING:
    from hocket.basics.types import Batch


def move(batch: Batch, device: torch.device) -> Any:
    """Move a batch to ``device``; tensors that are there already stay the same. Copies from pinned memory to CUDA are
    asynchronous.

    Copies to other devices are blocking, because nothing there waits for a ``non_blocking`` copy or keeps its source alive
    (pytorch#139550). Objects that are neither sequences nor mappings and have a method ``to`` are moved by it, as copies.

    Example:
        >>> import torch
        >>> from hocket.data import move
        >>> images, labels = move([torch.zeros(2, 3), torch.arange(2)], torch.device("cpu"))
    """
    # The usual shape. Within a step this saves more than 5 µs, several times what it saves in a micro-benchmark.
    if type(batch) is tuple or type(batch) is list:
        for item in batch:
            if type(item) is not torch.Tensor or item.device != device:
                break
        else:
            return batch
    return map_nested(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"), batch, device)
