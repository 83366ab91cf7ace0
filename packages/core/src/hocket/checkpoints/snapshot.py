"""A tree as it is written: JSON, and tensors, which may be copied so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.checkpoints import tree as trees
from hocket.checkpoints.tensors import Collector


class Snapshot:
    """What this rank writes of a tree. Its tensors are those of the tree, until they are copied.

    Rank 0 writes the tree and what all ranks have alike; of sharded tensors (DTensors) every rank writes its shards.
    Raises TypeError for what cannot be stored; the message says where it is.
    """

    def __init__(self, tree: Mapping[str, Any], rank: int = 0) -> None:
        collector = Collector()
        #: The tree's JSON.
        self.node = trees.encode(dict(tree), collector.add)
        self.stored = collector.stored(whole=rank == 0)
        #: Of each sharded tensor: its path, its reference, and the piece that this rank writes of it, or None.
        self.sharded = collector.sharded


class Staging:
    """Memory for copies of snapshots. It is kept from one to the next: touching new memory takes longer than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, snapshot: Snapshot) -> None:
        """Give the snapshot's tensors memory of their own, on the CPU. What the snapshot before it had there is lost."""
        before, self._kept = self._kept, {}
        sources = [each.tensor for each in snapshot.stored]
        for each in snapshot.stored:
            kept = before.pop(each.name, None)
            if kept is None or (kept.shape, kept.dtype) != (each.tensor.shape, each.tensor.dtype):
                kept = torch.empty_like(each.tensor, device="cpu", pin_memory=each.tensor.is_cuda)
            self._kept[each.name] = each.tensor = kept
        if sources:
            torch._foreach_copy_(list(self._kept.values()), sources, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
