"""What each rank has of a global batch: every sample once, on one rank, and the same number of training batches everywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from hocket import Strategy
from hocket.data.batches import Padding, count, slice_samples, unpadded
from hocket.data.global_batches import batch_size, by_index, makeup, sized, with_sampler
from hocket.data.indices import after, draws_once, pass_over
from hocket.data.passes import length
from hocket.data.prepared import Prepared
from hocket.training import seeding


def share(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and stop of a rank's contiguous share of ``samples``. Shares differ by at most one; lower ranks get the larger."""
    each, left = divmod(samples, world_size)
    start = rank * each + min(rank, left)
    return start, start + each + (rank < left)


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler deals out samples to ranks by itself, as torch's DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


class Kind(NamedTuple):
    """What a global batch is while it is divided: the number of its parts, and some of them."""

    size: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]


INDICES = Kind(len, lambda indices, start, stop: indices[start:stop])
SAMPLES = Kind(lambda batch: count(batch).samples, slice_samples)
#: As many batches as there are ranks, one for each.
BATCHES = Kind(len, lambda batches, start, stop: batches[start])


@dataclass(frozen=True)
class Sharing:
    """How global batches are shared out over the ranks of a strategy.

    Args:
        divide: whether batches are the global ones. Otherwise they are each rank's own, and as many as there are ranks, one
            after the other, make a global one.
        pad: whether a rank without a share gets `Padding`; otherwise it gets nothing.
        end: whether the pass ends before a global batch of which some rank has no share.
    """

    strategy: Strategy
    divide: bool
    pad: bool
    end: bool

    def whole(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Global batches, from batches."""
        return batches if self.divide else iter(lambda: list(islice(batches, self.strategy.data_ranks)), [])

    def shares(self, whole: Iterator[Any], divided: Kind) -> Iterator[Any]:
        """This rank's shares of global batches, which are ``divided`` as what they are, if they are."""
        kind = divided if self.divide else BATCHES
        rank, ranks = self.strategy.data_rank, self.strategy.data_ranks
        for batch in whole:
            size = kind.size(batch)
            start, stop = share(size, rank, ranks)
            if self.end and size < ranks:
                return
            if start < stop:
                yield kind.cut(batch, start, stop)
            elif self.pad:
                yield Padding(kind.cut(batch, 0, 1))

    def checked(self, whole: Iterator[Any], divided: Kind) -> Iterator[Any]:
        """Global batches; an error on every rank if they differ in size, or if some rank has none left when another has."""
        kind, unit = (divided, "samples") if self.divide else (BATCHES, "batches")
        while True:
            read = next(whole, _END)
            size = 0 if read is _END else kind.size(read)
            least, most = self.strategy.all_reduce(torch.tensor([size, -size]), "min").tolist()
            if least != -most:
                raise ValueError(
                    f"Ranks read different data: at the same place one has {least} {unit} and another one {-most} (0 means "
                    "that its data has ended). Every rank must read the same and keeps its share. If the data is divided "
                    "over ranks already, write strategy={'ddp': {'split_data': False}}."
                )
            if read is _END:
                return
            yield read

    def length(self, batches: Any) -> int:
        """This rank's batches in a pass over ``batches``, with a length. Raises TypeError where it is not known."""
        number, rank, ranks = len(batches), self.strategy.data_rank, self.strategy.data_ranks
        if not self.divide:
            if not self.pad:
                return len(range(rank, number, ranks))
            return number // ranks if self.end else -(-number // ranks)
        if not self.end:
            return number
        if not isinstance(batches, BatchSampler):
            raise TypeError("Of how many batches every rank has a share is not known before they are read.")
        last = 0 if batches.drop_last else len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
        return number - (0 < last < ranks)

    def makeup(self, data: Any) -> tuple[int, str]:
        """See `Prepared`."""
        return makeup(data) if self.divide else (self.strategy.data_ranks, "batches")


def shared(
    loader: Iterable[Any], strategy: Strategy, global_batch: int | None, *, train: bool, pad: bool, end: bool
) -> SharedLoader | SharedBatches:
    """This rank's share of data that every rank is given; see `Sharing` and `hocket.hookspecs.StrategyHooks.prepare_data`."""
    ranks = strategy.data_ranks
    if train and global_batch is None and (size := batch_size(loader)) is not None:
        global_batch = size * ranks  # and not so many batches, so that what is left at the end is divided evenly
    if global_batch is None:
        droppers = (loader, getattr(loader, "batch_sampler", None))
        end |= train and any(getattr(each, "drop_last", False) for each in droppers)
        sharing = Sharing(strategy, divide=False, pad=pad, end=end)
        return SharedLoader(loader, sharing) if by_index(loader) else SharedBatches(loader, sharing)
    sharing = Sharing(strategy, divide=True, pad=pad, end=end)
    if by_index(loader) and loader.batch_sampler is None:  # batch_size=None: a sample is a batch
        sampler = _Alike(loader.sampler, _generators(loader, loader.sampler), strategy)
        return SharedBatches(sized(with_sampler(loader, sampler=sampler), global_batch, ranks), sharing)
    data = sized(loader, global_batch, ranks)
    return SharedLoader(data, sharing) if by_index(data) else SharedBatches(data, sharing)


class SharedLoader(Prepared):
    """A DataLoader over a map-style data set that loads only this rank's share of each global batch.

    Everything but the sampler is the loader's own: workers, collation, pinning. Batches come in order whatever ``in_order``
    says: ranks that met them in different orders would mix samples of different global batches.
    """

    def __init__(self, loader: DataLoader[Any], sharing: Sharing) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"  # without batch_size a sample is a batch
        self._shares = _Shares(getattr(loader, name), loader, sharing)
        super().__init__(with_sampler(loader, **{name: self._shares}, in_order=True))
        self.makeup = sharing.makeup(loader)
        self._rank = sharing.strategy.data_rank
        self._generator = loader.generator

    def __iter__(self) -> Iterator[Any]:
        if self._generator is not None:
            # The sampler draws from it too and must do so alike on all ranks, but workers must not augment alike.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
            vars(self._data)["generator"] = torch.Generator().manual_seed(seed + self._rank)
        real: deque[bool] = deque()
        self._shares.real = real
        return _Pass(iter(self._data), real)

    def __len__(self) -> int:
        """Batches of this rank in a pass. Raises TypeError if the samplers do not say."""
        return len(self._shares)


class _Pass:
    """One pass over a loader: marks the batches that stand for nothing."""

    def __init__(self, batches: Iterator[Any], real: deque[bool]) -> None:
        self._batches = batches
        self._real = real

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        return batch if self._real.popleft() else Padding(batch)

    def _shutdown_workers(self) -> None:
        """Feed calls this to end a pass early."""
        if shutdown := getattr(self._batches, "_shutdown_workers", None):
            shutdown()


class _Shares:
    """Batch sampler: this rank's share of each global batch of indices. Or sampler: of each of indices that are batches."""

    own_stream = True

    def __init__(self, batches: Any, loader: DataLoader[Any], sharing: Sharing) -> None:
        self._batches, self._sharing = batches, sharing
        generators = _generators(loader, batches, getattr(batches, "sampler", None))
        self._alike = _Alike(batches, generators, sharing.strategy)
        #: Of each batch of the latest pass that was sampled and not yet handed out: whether it is a share at all.
        self.real: deque[bool] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(iter(self._alike), self.real)

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """See `hocket.data.indices.after`. Each global batch has one share for this rank."""
        each = 1 if self._sharing.divide else self._sharing.strategy.data_ranks
        batches, left_out = self._alike.after(skip * each)
        return self._indices(batches, self.real), -(-left_out // each)

    def _indices(self, batches: Iterator[Any], real: deque[bool]) -> Iterator[Any]:
        for mine in self._sharing.shares(self._sharing.whole(batches), INDICES):
            indices, counts = unpadded(mine)
            real.append(counts)
            yield indices

    def __len__(self) -> int:
        return self._sharing.length(self._batches)


class SharedBatches(Prepared):
    """Batches that every rank reads whole, and of which it keeps its share. Every rank must read the same ones.

    Raises ValueError on all ranks where training ranks read different batches, as far as that shows.
    """

    def __init__(self, data: Iterable[Any], sharing: Sharing) -> None:
        self.makeup = sharing.makeup(data)
        super().__init__(data)
        self._sharing = sharing

    def _whole(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self._sharing.whole(batches)

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        sharing = self._sharing
        return sharing.shares(sharing.checked(batches, SAMPLES) if sharing.pad else batches, SAMPLES)

    def __len__(self) -> int:
        return self._sharing.length(self._data)


class OwnBatches(Prepared):
    """Data that differs from rank to rank already. A pass can be continued by as many ranks as began it only.

    A rank that runs out before the others repeats its last batch as `Padding`; with ``end`` the pass is over for all of them
    instead. Raises ValueError on all ranks if one has no batch at all.
    """

    of_rank = True
    #: Whether the next pass begins with a batch that was trained on already, and is here to be repeated only.
    hold = False
    #: Batches of this rank's data in this pass.
    read = 0

    def __init__(self, data: Iterable[Any], strategy: Strategy, end: bool) -> None:
        super().__init__(data)
        self._strategy, self._end = strategy, end
        self.makeup = (strategy.data_ranks, "batches")
        lengths = strategy.all_gather_object(length(data))
        self._length = None if None in lengths else min(lengths) if end else max(lengths)

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        hold, self.hold, self.read = self.hold, False, 0
        return self._together(batches, next(batches) if hold else _END)

    def _together(self, batches: Iterator[Any], batch: Any) -> Iterator[Any]:
        strategy, more = self._strategy, True
        while True:
            if more:
                read = next(batches, _END)
                more = read is not _END
                self.read += more
                batch = read if more else batch
            left, empty = strategy.all_reduce(torch.tensor([more, batch is _END]), "sum").tolist()
            if not left:
                return
            if empty:
                raise ValueError(
                    f"The training data of {empty} of {strategy.world_size} ranks yielded no batch, so these ranks have "
                    "nothing to compute on while the others train. Divide the data so that every rank has a batch."
                )
            if self._end and left < strategy.world_size:
                return
            yield batch if more else Padding(batch)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("How many batches a pass has is not known: the data of a rank does not say.")
        return self._length


_END = object()


class _Alike:
    """What a sampler yields on rank 0, on every rank, by giving it rank 0's random numbers: one broadcast a pass.

    Rank 0's sampler finds the random numbers that it would find without the others, so that one seed gives the same global
    batches for any number of ranks. The other ranks' own random numbers, which augment and drop out, are left alone.
    """

    #: Samplers that go on drawing are given a stream of their own here.
    own_stream = True

    def __init__(self, sampler: Any, generators: list[torch.Generator], strategy: Strategy) -> None:
        self._sampler = sampler
        self._generators = generators
        self._strategy = strategy

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if draws_once(self._sampler):
            yield from self.after(0)[0]
            return
        items: Iterator[Any] | None = None
        stream: dict[str, Any] | None = None
        while True:
            with self._drawing(stream):
                items = iter(self._sampler) if items is None else items
                item = next(items, _END)
                stream = seeding.capture(devices=False)
            if item is _END:
                return
            yield item

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """See `hocket.data.indices.after`."""
        if not draws_once(self._sampler):
            items = iter(self)
            return items, pass_over(items, skip)
        with self._drawing(None):
            items, done = after(self._sampler, skip)
            first = [] if skip else list(islice(items, 1))  # with it is drawn what there is to draw
        return chain(first, items), done

    @contextmanager
    def _drawing(self, stream: dict[str, Any] | None) -> Iterator[None]:
        """Inside, random numbers are those of ``stream``, or where it begins rank 0's."""
        own, begins = seeding.capture(devices=False), stream is None
        if begins:
            states = [generator.get_state() for generator in self._generators]
            stream, states = self._strategy.broadcast_object((own, states))
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        seeding.restore(stream)  # type: ignore[arg-type]  # set where it begins
        try:
            yield
        finally:
            # With rank 0's data the first draw is a draw like any other; what a sampler draws later is in a stream of its own,
            # which training on no rank moves on.
            if not (begins and self._strategy.data_rank == 0):
                seeding.restore(own)


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators of their own that a loader and its samplers draw from."""
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
