"""A tree as it is written: JSON, and tensors, which may be copied so that training continues while they are written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from hocket_checkpoints.storage import pages, tree_json
from hocket_checkpoints.storage.tensors import Collector


class Snapshot:
    """The part of a tree that this rank writes. Its tensors are those of the tree, until they are copied.

    Rank 0 writes the tree and everything that is identical on all ranks; every rank writes its shards of DTensors.
    Raises TypeError for a value that cannot be stored; the message names its path.
    """

    def __init__(self, tree: Mapping[str, Any], rank: int = 0) -> None:
        collector = Collector()
        #: The tree's JSON.
        self.node = tree_json.to_json(dict(tree), collector.add)
        self.stored = collector.stored(whole=rank == 0)
        #: For each sharded tensor: its path, its reference, and the piece that this rank writes, or None.
        self.sharded = collector.sharded


class Staging:
    """Memory for copies of snapshots. It is reused for the next one, because touching new memory takes longer than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, snapshot: Snapshot, later: Callable[[Tensor], bool] = lambda tensor: False) -> Callable[[], None]:
        """Copy the snapshot's tensors to CPU memory, which overwrites the copies of the previous snapshot.

        Returns a function that copies the tensors for which ``later(tensor)`` is true; they must not change until then.
        Another thread may call it.
        """
        before, self._kept = self._kept, {}
        now: list[_Copy] = []
        rest: list[_Copy] = []
        for each in snapshot.stored:
            source, kept = each.tensor, before.pop(each.name, None)
            if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
                kept = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
                kept = kept if source.is_cuda else pages.advise(kept)
            self._kept[each.name] = each.tensor = kept
            (rest if later(source) else now).append((kept, source))
        # The copy waits for everything that was enqueued on the device until now.
        devices = {source.device for _, source in rest if source.is_cuda}
        streams = {device: torch.cuda.Stream(device) for device in devices}
        for device, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        _copy(now)

        def copy_rest() -> None:
            with ExitStack() as stack:
                for stream in streams.values():
                    stack.enter_context(torch.cuda.stream(stream))
                _copy(rest)

        return copy_rest


#: Target and source.
_Copy = tuple[Tensor, Tensor]
#: Bytes that a thread copies at a time.
_CHUNK = 1 << 25
_THREADS = 4


def _copy(copies: Iterable[_Copy]) -> None:
    jobs: list[tuple[int, int, int]] = []
    devices = set()
    for kept, source in copies:
        if source.is_cpu and source.is_contiguous() and kept.is_contiguous():
            to, of, size = kept.data_ptr(), source.data_ptr(), source.nbytes
            jobs += [(to + at, of + at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK)]
        else:
            kept.copy_(source, non_blocking=source.is_cuda)  # of which only CUDA can be waited for
            devices |= {source.device} if source.is_cuda else set()
    # Not torch's threads: launchers limit them to one, and they wait for each other at every tensor.
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda job: ctypes.memmove(*job), jobs))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
