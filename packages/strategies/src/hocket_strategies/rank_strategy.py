"""The base of strategies with several ranks: join a process group, divide data, run collectives."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket import Device, Strategy, hookimpl
from hocket.basics import launch_environment
from hocket.data.adapters import adapt
from hocket.data.batches import Padding
from hocket.errors import WrongValue
from hocket.help import warn
from hocket_strategies import gloo_shutdown, rendezvous
from hocket_strategies.collective_errors import Explained
from hocket_strategies.rank_slices import OwnData, SlicedLoader, is_distributed, sliced
from hocket_strategies.tensor_coalescing import packed, unpack

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


_T = TypeVar("_T")


class OfModels(WeakKeyDictionary[nn.Module, _T]):
    """Data about models, held as long as they live. Pickles as empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class RankStrategy(Strategy):
    """Base class of strategies with several ranks. Subclasses prepare model and optimizer.

    Args:
        split_data: whether every rank is given the same data and takes its slice. False if each rank already has
            different data.
        uneven: what happens in training when some rank runs out of batches before the others. ``"pad"``: it computes on a
            padding batch. ``"end"``: the epoch ends on all ranks.
        timeout: seconds that a rank waits for the others before it raises `CollectiveError`; does not apply to an existing
            process group.

    Raises:
        ValueError: the timeout is not positive, or ``uneven`` is neither ``"pad"`` nor ``"end"``.
    """

    distributed: ClassVar[bool] = True
    #: Whether every rank must take part in every forward pass, in evaluation too.
    together: ClassVar[bool] = False

    #: The users of a process group that one of them initialised; the last one to leave destroys it.
    _users: ClassVar[list[RankStrategy]] = []
    #: Whether this group stays until the process ends.
    _kept: ClassVar[bool] = False

    def __init__(self, *, split_data: bool = True, uneven: str = "pad", timeout: float = 1800.0) -> None:
        if not timeout > 0:
            raise WrongValue(
                f"«timeout={timeout!r}» is not a valid timeout; give a positive number of seconds, such as 1800."
            )
        if uneven not in ("pad", "end"):
            raise WrongValue(
                f"«uneven={uneven!r}» is not a policy for ranks with unequal numbers of batches; write 'pad' (train until the "
                "last rank runs out) or 'end' (until the first does)."
            )
        self._split_data, self._uneven = split_data, uneven
        self._timeout = float(timeout)
        #: For objects and tensors on the CPU; None is the default group.
        self._host: dist.ProcessGroup | None = None
        self._warned: set[str] = set()
        #: A model's buffers by owner and name, because a module may assign a new tensor.
        self._buffers: OfModels[list[tuple[dict[str, Tensor | None], str]]] = OfModels()

    @property
    def _name(self) -> str:
        """The strategy's name for users."""
        return type(self).__name__.lower()

    @property
    def _equal_microbatches(self) -> bool:
        """Whether every rank needs the same number of microbatches, because each of them is a collective."""
        return self.together

    # --- processes

    def setup_environment(self, device: Device) -> torch.device:
        """Join the ranks that a launcher started, or those of an existing process group.

        The backend is gloo on the CPU and nccl on NVIDIA and AMD GPUs. Raises RuntimeError if this process was started
        alone, CollectiveError if the others do not join in time, ValueError for a device that neither backend supports.
        """
        joined = dist.is_available() and dist.is_initialized()
        found = launch_environment.current() if joined else rendezvous.environment(self._name)
        if joined:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if found is not None and (found.rank, found.world_size) != (self.rank, self.world_size):
                found = None  # the environment describes other processes than those of the group
        else:
            assert found is not None
            self.rank, self.world_size = found.rank, found.world_size
        if found is None or found.local_rank is None:
            self.local_rank = self.rank % (torch.cuda.device_count() or self.world_size)
        else:
            self.local_rank = found.local_rank
        on = device.torch_device(self.local_rank)
        if on.type not in _BACKENDS:
            raise WrongValue(
                f"«strategy='{self._name}'» runs on {' and '.join(_BACKENDS)}, not on {on.type}. Pass «device='cpu'»."
            )
        if on.type == "cuda":
            torch.cuda.set_device(on)  # nccl uses the current one
        if not joined:
            RankStrategy._users.clear()
            RankStrategy._kept = False
            assert found is not None
            rendezvous.join(self._name, self._backend(on), found, on, self._timeout)
        if not joined or RankStrategy._users or RankStrategy._kept:
            RankStrategy._users.append(self)
        # Agreeing on a few numbers must not wait for a GPU, so they stay on the CPU.
        self._host = None if dist.get_backend() == "gloo" else _group_of_all_on_cpu(self._timeout)
        self._explained = Explained(self._name, self.rank, self.world_size, self._timeout)
        gloo_shutdown.wait_at_exit()
        return on

    def _backend(self, on: torch.device) -> str:
        """Return the backend that a process group is initialised with."""
        return _BACKENDS[on.type]

    def barrier(self) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.barrier`."""
        with self._explained:
            dist.barrier(group=self._host)
        return True

    def shutdown(self) -> None:
        """Leave the process group, and destroy it if a strategy initialised it and no other uses it. May be called twice."""
        if self in RankStrategy._users:
            RankStrategy._users.remove(self)
            if not RankStrategy._users and not RankStrategy._kept and dist.is_initialized():
                dist.destroy_process_group()

    def _keep_group(self) -> None:
        """Keep the process group until the process ends. torch caches DTensor redistributions by mesh layout, together with the
        names of its groups; a later mesh of the same layout would look up groups that no longer exist."""
        if self in RankStrategy._users and not RankStrategy._kept:
            RankStrategy._kept = True
            atexit.register(_leave)

    # --- the data

    def prepare_data(self, loader: Iterable[Any], train: bool, global_batch: int | None = None) -> Iterable[Any]:
        """Return this rank's slices of ``loader``; see :meth:`hocket.hookspecs.StrategyHooks.prepare_data`.

        A DataLoader over a map-style data set loads only this slice; the shuffled order is identical on all ranks. Other data
        is read in full by every rank, which keeps its slice, and a warning says so. Data that differs between ranks is used as
        it is.

        Raises:
            ValueError: the loader's DistributedSampler was made for another world size or rank; ``global_batch`` is less than
                the number of ranks, or is given for data that differs between ranks.
        """
        if self.world_size == 1:
            return super().prepare_data(loader, train, global_batch)
        # An evaluation counts every sample, so it never ends early.
        pad, end = train or self.together, train and self._uneven == "end"
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        distributed = next((sampler for sampler in samplers if is_distributed(sampler)), None)
        if distributed is not None:
            self._check(distributed)
        if distributed is not None or not self._split_data:
            if global_batch is not None:
                raise WrongValue(
                    f"«global_batch={global_batch}» does not apply to data that already differs between ranks, because of a "
                    "DistributedSampler or «split_data=False». Omit it and give each rank's loader a batch_size, or remove "
                    "the sampler or «split_data=False»."
                )
            return adapt(loader, OwnData(loader, self, end)) if pad else loader
        data = sliced(loader, self, global_batch, train=train, pad=pad, end=end)
        if not isinstance(data, SlicedLoader):
            self._warn_once(
                f"Every rank reads all of the {type(loader).__name__} and keeps its slice, so reading does not get faster with "
                "more ranks, and every rank must read the same. A DataLoader over a map-style data set is divided before it is "
                f"read. If each rank already has different data, write «strategy={{'{self._name}': {{'split_data': False}}}}»."
            )
        return data

    def _check(self, sampler: Any) -> None:
        if (sampler.rank, sampler.num_replicas) != (self.data_rank, self.data_ranks):
            raise WrongValue(
                f"The {type(sampler).__name__} was made for rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
                f"{self.data_rank} of {self.data_ranks}. Remove the sampler: «strategy='{self._name}'» divides the batches."
            )
        self._warn_once(
            f"The loader's {type(sampler).__name__} divides the data: batch_size applies to each of the {self.data_ranks} "
            "ranks, and samples that the sampler repeats to make ranks even are trained on, or counted in evaluation, more "
            "than once. Remove the sampler to have the data divided exactly."
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and self.rank == 0:
            warn(message)
        self._warned.add(message)

    @hookimpl(wrapper=True)
    def split_batch(self, batch: Any):  # type: ignore[no-untyped-def]  # a generator of one value
        """Give every rank the same number of microbatches where each is a collective, by adding padding."""
        microbatches = yield
        if self._equal_microbatches and self.world_size > 1:
            most = int(self.all_reduce(torch.tensor(len(microbatches)), "max"))
            microbatches = [*microbatches, *[Padding(microbatches[-1])] * (most - len(microbatches))]
        return microbatches

    # --- collectives

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return the sum, mean, min or max over ranks as a new tensor of the same shape and device, without a graph.

        The dtype stays, except that bools become int64 0 and 1, and the mean of integers is a float.
        Raises ValueError for another ``op``.
        """
        if op not in _OPERATIONS:
            raise WrongValue(f"all_reduce has no «op={op!r}»; use one of {', '.join(map(repr, _OPERATIONS))}.")
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if reduced.dtype is torch.bool:
            reduced = reduced.long()
        with self._explained:
            dist.all_reduce(reduced, _OPERATIONS[op], group=self._group(reduced))
        return reduced / self.world_size if op == "mean" else reduced

    def all_gather_object(self, item: Any) -> list[Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.all_gather_object`."""
        items: list[Any] = [None] * self.world_size
        with self._explained:
            dist.all_gather_object(items, item, group=self._host)
        return items

    def broadcast_object(self, item: Any) -> Any:
        """See :meth:`hocket.hookspecs.StrategyHooks.broadcast_object`."""
        box = [item]
        with self._explained:
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    # --- broadcast rank 0's values

    def _watch_buffers(self, module: nn.Module) -> None:
        self._buffers[module] = [(owner._buffers, name) for owner in module.modules() for name in owner._buffers]

    @contextmanager
    def _with_synced_buffers(self, module: nn.Module) -> Iterator[None]:
        with self._explained:
            yield
            self._broadcast_buffers(module)

    def _broadcast_buffers(self, module: nn.Module) -> None:
        self._broadcast([buffer for owner, name in self._buffers[module] if (buffer := owner[name]) is not None])

    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's values into the tensors of all other ranks."""
        for flat, group in packed(tensors):
            dist.broadcast(flat, 0, group=self._group(flat))
            if self.rank:
                unpack(flat, group)

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._host if tensor.device.type == "cpu" else None


def _leave() -> None:
    if RankStrategy._kept and dist.is_initialized():
        dist.destroy_process_group()


def _group_of_all_on_cpu(seconds: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)  # ranks outside of the group get something else
    return group
