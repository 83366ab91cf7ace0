"""Data parallelism: every rank holds the whole model, computes on its share of each batch, and gradients are averaged."""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hocket import Device, Strategy
from hocket_strategies.shares import OwnBatches, SharedLoader, SlicedBatches, is_distributed

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_NOTHING = nullcontext()


class DDP(Strategy):
    """torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704) over all ranks that were started.

    Start a script with ``torchrun --nproc-per-node 2 script.py``; a process group that is initialised already is used as it
    is. Batches of the user's loaders are the *global* batches: each rank loads a contiguous share of each, so that the
    learning rate and the number of steps do not depend on the number of ranks.

    After every batch the buffers of rank 0 (running statistics of batch norm) become those of all ranks, so that all ranks
    evaluate, average and save the same model.

    Args:
        static_graph: promise torch that every batch uses the same parameters in the same order. The first batch must not be
            cut into microbatches (ValueError); later ones may be.
        find_unused_parameters: look in every batch for parameters that the loss does not depend on; costs a pass over the
            graph. Without it such parameters are an error.
        bucket_cap_mb: reduce gradients in pieces of so many megabytes; None for torch's default.
        split_data: whether loaders yield global batches. False if the data of each rank differs already, as with a data set
            that reads only its rank's files; then batches are each rank's own. So they are wherever a loader has a
            DistributedSampler.
    """

    #: Who uses the process group that one of them initialised; the last one to leave destroys it.
    _users: ClassVar[list[DDP]] = []

    def __init__(
        self,
        *,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
        split_data: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._split_data = split_data
        #: For objects and tensors on the CPU; None is the default group.
        self._host: dist.ProcessGroup | None = None
        #: Where the wrapped module's buffers are: owner and name, because a module may put a new tensor there.
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []
        self._first_batch = True
        self._told: set[str] = set()

    # --- processes

    def setup_environment(self, device: Device) -> torch.device:
        """Join the ranks that ``torchrun`` started, or those of a process group that is initialised already.

        The backend is gloo on the CPU and nccl on NVIDIA and AMD GPUs. Raises RuntimeError if this process was started
        alone, ValueError for a device that neither serves.
        """
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if joined else _from_environment()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank % (torch.cuda.device_count() or self.world_size)))
        on = device.torch_device(self.local_rank)
        if on.type not in _BACKENDS:
            raise ValueError(f"strategy='ddp' runs on {' and '.join(_BACKENDS)}, not on {on.type}. Pass device='cpu'.")
        if on.type == "cuda":
            torch.cuda.set_device(on)  # nccl uses the current one
        if not joined:
            DDP._users.clear()
            _initialise(_BACKENDS[on.type], self.rank, self.world_size, on)
        if not joined or DDP._users:
            DDP._users.append(self)
        # Agreeing on a few numbers must not make anyone wait for a GPU, so they never go there.
        self._host = None if dist.get_backend() == "gloo" else _group_of_all_on_cpu()
        return on

    def barrier(self) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.barrier`."""
        dist.barrier(group=self._host)
        return True

    def shutdown(self) -> None:
        """Leave the process group, and destroy it if a DDP initialised it and no other uses it. May be called twice."""
        if self in DDP._users:
            DDP._users.remove(self)
            if not DDP._users and dist.is_initialized():
                dist.destroy_process_group()

    # --- the model

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """The module in a DistributedDataParallel, with rank 0's weights and buffers everywhere.

        A module without a parameter to train, or one rank alone, is left unwrapped.
        """
        if self.world_size == 1:
            return module
        self._first_batch = True
        self._buffers = [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._broadcast_buffers()
            return DistributedDataParallel(module, **self._options, **_without_buffers())
        self._broadcast([*module.parameters(), *module.buffers()])
        return module

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Reduces gradients, and hands out rank 0's buffers, only when ``last``."""
        if not isinstance(module, DistributedDataParallel):
            return _NOTHING
        if not last:
            if self._first_batch and module.static_graph:
                raise ValueError(
                    "static_graph=True cannot begin with a batch that is cut into microbatches: torch's reducer would "
                    "fail, or average wrong gradients afterwards. Leave out static_graph or microbatch."
                )
            return module.no_sync()
        self._first_batch = False
        return self._with_buffers_alike() if self._buffers else _NOTHING

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_state`."""
        return super().model_state(_unwrapped(module))

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        return super().load_model_state(_unwrapped(module), state_dict)

    @contextmanager
    def _with_buffers_alike(self) -> Iterator[None]:
        yield
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        self._broadcast([buffer for owner, name in self._buffers if (buffer := owner[name]) is not None])

    @torch.no_grad()
    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Rank 0's values into the tensors of the others, in one piece per dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in kinds.values():
            packed = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(packed, 0, group=self._group(packed))
            if self.rank:
                for tensor, values in zip(alike, packed.split([t.numel() for t in alike]), strict=True):
                    tensor.copy_(values.view_as(tensor))

    # --- the data

    def prepare_data(self, loader: Iterable[Any], train: bool) -> Iterable[Any]:
        """This rank's share of the global batches of ``loader``.

        A DataLoader over a map-style data set loads only that share, in the same shuffled order on every rank. Anything else
        is read whole on every rank and sliced, with a warning. Data that differs from rank to rank already is used as it is.

        Raises:
            ValueError: the loader's DistributedSampler was made for another number of ranks, or for another rank.
        """
        if self.world_size == 1:
            return loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        distributed = next((sampler for sampler in samplers if is_distributed(sampler)), None)
        if distributed is not None:
            self._check(distributed)
        if distributed is not None or not self._split_data:
            return OwnBatches(loader, self) if train else loader
        if (
            isinstance(loader, DataLoader)
            and batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
        ):
            return SharedLoader(loader, self, train)
        self._tell(
            f"Every rank reads all of the {type(loader).__name__} and keeps its share of each batch, so reading does not get "
            "faster with more ranks, and every rank must read the same. A DataLoader over a map-style data set is divided "
            "before it is read. If the data of each rank differs already, write strategy={'ddp': {'split_data': False}}."
        )
        return SlicedBatches(loader, self, train)

    def _check(self, sampler: Any) -> None:
        if (sampler.rank, sampler.num_replicas) != (self.rank, self.world_size):
            raise ValueError(
                f"The {type(sampler).__name__} was made for rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
                f"{self.rank} of {self.world_size}. Leave the sampler out: strategy='ddp' divides the batches."
            )
        self._tell(
            f"The loader's {type(sampler).__name__} is left in charge: batch_size counts for each of the {self.world_size} "
            "ranks, and a sampler that repeats samples to make ranks even also trains on them, or counts them in "
            "evaluation, more than once. Leave the sampler out to have the loader's batches divided exactly."
        )

    def _tell(self, message: str) -> None:
        if message not in self._told and self.rank == 0:
            warnings.warn(message, stacklevel=3)
        self._told.add(message)

    # --- collectives

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Sum, mean, min or max over ranks, as a new tensor of the same shape and device, without a graph.

        The dtype stays, but for truth values, which count as int64 0 and 1, and the mean of integers, which is a float.
        Raises ValueError for another ``op``.
        """
        if op not in _OPERATIONS:
            raise ValueError(f"all_reduce has no op={op!r}; use one of {', '.join(map(repr, _OPERATIONS))}.")
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if reduced.dtype is torch.bool:
            reduced = reduced.long()
        dist.all_reduce(reduced, _OPERATIONS[op], group=self._group(reduced))
        return reduced / self.world_size if op == "mean" else reduced

    def all_gather_object(self, item: Any) -> list[Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.all_gather_object`."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self._host)
        return items

    def broadcast_object(self, item: Any) -> Any:
        """See :meth:`hocket.hookspecs.StrategyHooks.broadcast_object`."""
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._host if tensor.device.type == "cpu" else None


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _group_of_all_on_cpu() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # ranks that are left out get something else
    return group


@cache
def _without_buffers() -> dict[str, Any]:
    """What turns off DistributedDataParallel's own broadcast of buffers: renamed in torch, and the old name warns."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options): False}


# --- joining

_groups = itertools.count()


def _from_environment() -> tuple[int, int]:
    """Rank and number of ranks."""
    if not dist.is_available():
        raise RuntimeError(
            "This build of torch has no torch.distributed, which strategy='ddp' needs. Use strategy='single'."
        )
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"strategy='ddp' found nobody to train with: {', '.join(missing)} not set in the environment, and no process "
            "group is initialised. Start the script once per GPU (or CPU rank), as in torchrun --nproc-per-node 2 script.py, "
            "or train in this process with strategy='single'."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _initialise(backend: str, rank: int, world_size: int, on: torch.device) -> None:
    # A prefix of its own for each restart and each group: ranks that found the addresses of an earlier one would wait for
    # processes that are gone. (torch leaves that to its agent, whose store outlives the workers.)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(
        f"hocket/{attempt}/{next(_groups)}",
        _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size),
    )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=on if on.type == "cuda" else None
    )


@cache
def _store(address: str, port: int, rank: int, world_size: int) -> dist.Store:
    """The key-value store where ranks meet: the agent's where it opened one, otherwise rank 0's. Lives with the process."""
    opened = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0 and not opened,
        wait_for_workers=False,
        multi_tenant=True,
    )
