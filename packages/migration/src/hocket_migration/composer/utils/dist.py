"""Processes that train together: who they are, and collectives, which do nothing in one process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Dataset, DistributedSampler

from hocket.basics.objects import pack, unpack
from hocket.errors import WrongState


def _number(variable: str, alone: int) -> int:
    return int(os.environ.get(variable, alone))


def is_available() -> bool:
    """Whether torch has collectives."""
    return distributed.is_available()


def is_initialized() -> bool:
    """Whether there is a process group."""
    return distributed.is_available() and distributed.is_initialized()


def get_world_size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if is_initialized() else _number("WORLD_SIZE", 1)


def get_global_rank(group: Any = None) -> int:
    """Return the number of this process among all, or in a group."""
    return distributed.get_rank(group) if is_initialized() else _number("RANK", 0)


def get_local_world_size() -> int:
    """Return the number of processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return the number of this process on this machine."""
    return _number("LOCAL_RANK", 0)


def get_node_rank() -> int:
    """Return the number of this machine."""
    return _number("NODE_RANK", _number("GROUP_RANK", get_global_rank() // get_local_world_size()))


def initialize_dist(device: Any = None, timeout: float = 300.0) -> None:
    """Make a process group, unless there is one or this process is alone. The Trainer makes it otherwise."""
    if is_initialized() or _number("WORLD_SIZE", 1) == 1:
        return
    gpu = "cuda" in str(device) or device == "gpu" or (device is None and torch.cuda.is_available())
    if gpu:
        torch.cuda.set_device(get_local_rank())
    distributed.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout))


def _alone() -> bool:
    if is_initialized():
        return False
    if get_world_size() > 1:
        raise WrongState(
            "There is no process group yet. Call dist.initialize_dist() first, or make the Trainer before."
        )
    return True


def barrier(group: Any = None) -> None:
    """Wait for all processes."""
    if not _alone():
        distributed.barrier(group)


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM", group: Any = None) -> None:
    """Reduce a tensor over all processes, in place."""
    if not _alone():
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, reduce_operation.upper()), group)


def broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> None:
    """Overwrite a tensor by that of a process."""
    if not _alone():
        distributed.broadcast(tensor, src, group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Any = None) -> None:
    """Overwrite a list by that of a process."""
    if not _alone():
        packed = [pack(each) for each in object_list]
        distributed.broadcast_object_list(packed, src, group)
        object_list[:] = [unpack(each) for each in packed]


def all_gather(tensor: torch.Tensor, group: Any = None) -> Sequence[torch.Tensor]:
    """Return the tensors of all processes."""
    if _alone():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, tensor, group)
    return gathered


def all_gather_object(obj: Any, group: Any = None) -> list[Any]:
    """Return the objects of all processes."""
    if _alone():
        return [obj]
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, pack(obj), group)
    return [unpack(each) for each in gathered]


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[Any]:
    """Return a sampler of this process's part of a data set.

    Example:
        >>> from hocket_migration.composer.utils import dist
        >>> list(dist.get_sampler([1, 2, 3]))
        [0, 1, 2]
    """
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run the block in the first process of each machine, then in the others."""
    first = get_local_rank() == 0
    if not first:
        barrier()
    yield
    if first:
        barrier()
