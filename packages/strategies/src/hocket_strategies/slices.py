"""Per-rank slices of global batches: every sample once, on one rank, and the same number of training batches everywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from hocket import Strategy
from hocket.data.adapters import adapt
from hocket.data.batches import Padding, count, slice_samples, unpadded
from hocket.data.global_batches import resized
from hocket.data.indices import after, draws_once, skip_items
from hocket.data.loaders import batch_size, by_index, sampler_name, with_sampler
from hocket.data.slices import Slices
from hocket.data.source import Source, known_length
from hocket.data.sources.by_index import ByIndex
from hocket.training import seeding


def bounds(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and stop of a rank's contiguous slice of ``samples``. Sizes differ by at most one; lower ranks get more."""
    each, left = divmod(samples, world_size)
    start = rank * each + min(rank, left)
    return start, start + each + (rank < left)


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler divides samples over ranks itself, as torch's DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


class Kind(NamedTuple):
    """What a global batch is while it is divided: the number of its parts, and some of them."""

    size: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]


INDICES = Kind(len, lambda indices, start, stop: indices[start:stop])
SAMPLES = Kind(lambda batch: count(batch).samples, slice_samples)
#: As many batches as there are ranks, one for each.
BATCHES = Kind(len, lambda batches, start, stop: batches[start])


class RankSlices(Slices):
    """This rank's slices of global batches, which every rank reads completely.

    Raises ValueError on all ranks where training ranks read different batches, as far as that shows.

    Args:
        divide: whether batches are the global ones. Otherwise they are each rank's own, and as many as there are ranks, one
            after the other, make a global one.
        pad: whether a rank without a slice gets `Padding`; otherwise it gets nothing.
        end: whether the epoch ends before a global batch of which some rank has no slice.
        check: what checks the batches that are read.
    """

    def __init__(self, strategy: Strategy, *, divide: bool, pad: bool, end: bool, check: Slices | None = None) -> None:
        super().__init__(None if divide else (strategy.data_ranks, "batches"))
        self.strategy, self.divide, self.pad, self.end = strategy, divide, pad, end
        self.each = 1 if divide else strategy.data_ranks
        self._check = Slices() if check is None else check

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """See :meth:`hocket.data.Slices.slice`."""
        groups = self.grouped(self._check.slice(batches))
        return self.of_rank(self._agreed(groups) if self.pad else groups, SAMPLES)

    def grouped(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return global batches, from batches."""
        return batches if self.divide else iter(lambda: list(islice(batches, self.each)), [])

    def of_rank(self, groups: Iterator[Any], divided: Kind) -> Iterator[Any]:
        """Yield this rank's slices of global batches, which are ``divided`` as what they are, if they are."""
        kind = divided if self.divide else BATCHES
        rank, ranks = self.strategy.data_rank, self.strategy.data_ranks
        for group in groups:
            size = kind.size(group)
            start, stop = bounds(size, rank, ranks)
            if self.end and size < ranks:
                return
            if start < stop:
                yield kind.cut(group, start, stop)
            elif self.pad:
                yield Padding(kind.cut(group, 0, 1))

    def _agreed(self, groups: Iterator[Any]) -> Iterator[Any]:
        """Yield global batches; an error on every rank if they differ in size, or if some rank has none left."""
        kind, unit = (SAMPLES, "samples") if self.divide else (BATCHES, "batches")
        while True:
            read = next(groups, _END)
            size = 0 if read is _END else kind.size(read)
            least, most = self.strategy.all_reduce(torch.tensor([size, -size]), "min").tolist()
            if least != -most:
                raise ValueError(
                    f"Ranks read different data: at the same place one has {least} {unit} and another one {-most} (0 means "
                    "that its data has ended). Every rank must read the same and keeps its slice. If the data is divided "
                    "over ranks already, write strategy={'ddp': {'split_data': False}}."
                )
            if read is _END:
                return
            yield read

    def length(self, batches: int) -> int:
        """See :meth:`hocket.data.Slices.length`."""
        rank, ranks = self.strategy.data_rank, self.strategy.data_ranks
        if not self.divide:
            if not self.pad:
                return len(range(rank, batches, ranks))
            return batches // ranks if self.end else -(-batches // ranks)
        if not self.end:
            return batches
        raise TypeError("Of how many batches every rank has a slice is not known before they are read.")

    def length_of(self, sampler: Any) -> int:
        """Return :meth:`length` for batches of indices, whose sizes a sampler of torch's says."""
        if not (self.divide and self.end and isinstance(sampler, BatchSampler)):
            return self.length(len(sampler))
        last = 0 if sampler.drop_last else len(sampler.sampler) % sampler.batch_size  # type: ignore[arg-type]
        return len(sampler) - (0 < last < self.strategy.data_ranks)


def sliced(
    loader: Iterable[Any], strategy: Strategy, global_batch: int | None, *, train: bool, pad: bool, end: bool
) -> Source:
    """Return this rank's slices of data that every rank is given; see `hocket.hookspecs.StrategyHooks.prepare_data`."""
    ranks = strategy.data_ranks
    if train and global_batch is None and (size := batch_size(loader)) is not None:
        global_batch = size * ranks  # and not so many batches, so that what is left at the end is divided evenly
    if global_batch is None:
        droppers = (loader, getattr(loader, "batch_sampler", None))
        end |= train and any(getattr(each, "drop_last", False) for each in droppers)
        slices = RankSlices(strategy, divide=False, pad=pad, end=end)
        return SlicedLoader(loader, slices, loader) if by_index(loader) else adapt(loader, slices)
    samples_are_batches = by_index(loader) and loader.batch_sampler is None
    data: Any = loader
    if samples_are_batches:
        sampler = _FromRank0(data.sampler, _generators(data, data.sampler), strategy)
        data = with_sampler(data, sampler=sampler)
    data, check = resized(data, global_batch, ranks)
    slices = RankSlices(strategy, divide=True, pad=pad, end=end, check=check)
    if by_index(data) and not samples_are_batches:
        return SlicedLoader(data, slices, loader)
    return adapt(data, slices, given=loader)


class SlicedLoader(ByIndex):
    """A DataLoader over a map-style data set that loads only this rank's slice of each global batch.

    Everything but the sampler is the loader's own: workers, collation, pinning. Batches come in order whatever ``in_order``
    says: ranks that met them in different orders would mix samples of different global batches.
    """

    def __init__(self, loader: DataLoader[Any], slices: RankSlices, given: Any) -> None:
        name = sampler_name(loader)
        self._sampler = _SlicedSampler(getattr(loader, name), loader, slices)
        size = batch_size(loader)
        made_of = slices.global_batch or ((1, "batches") if size is None else (size, "samples"))
        super().__init__(with_sampler(loader, **{name: self._sampler}, in_order=True), Slices(made_of), given)
        self._rank = slices.strategy.data_rank
        self._generator = loader.generator

    def iterate(self) -> Iterator[Any]:
        """See :meth:`hocket.data.DataSource.iterate`."""
        if self._generator is not None:
            # The sampler draws from it too and must draw the same on all ranks, but workers must not augment the same.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
            vars(self.data)["generator"] = torch.Generator().manual_seed(seed + self._rank)
        self._sampler.real = real = deque[bool]()
        return _marked(super().iterate(), real)


def _marked(batches: Iterator[Any], real: deque[bool]) -> Iterator[Any]:
    """Yield batches, marked as padding where this rank has no slice."""
    for batch in batches:
        yield batch if real.popleft() else Padding(batch)


class _SlicedSampler:
    """Batch sampler: this rank's slice of each global batch of indices. Or sampler: of each of indices that are batches."""

    own_stream = True

    def __init__(self, batches: Any, loader: DataLoader[Any], slices: RankSlices) -> None:
        self._batches, self._slices = batches, slices
        generators = _generators(loader, batches, getattr(batches, "sampler", None))
        self._same = _FromRank0(batches, generators, slices.strategy)
        #: Of each batch of the latest epoch that was sampled and not yet yielded: whether it is a slice at all.
        self.real: deque[bool] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(iter(self._same), self.real)

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """See `hocket.data.indices.after`. Each global batch has one slice for this rank."""
        batches, passed = self._same.after(skip * self._slices.each)
        return self._indices(batches, self.real), -(-passed // self._slices.each)

    def _indices(self, batches: Iterator[Any], real: deque[bool]) -> Iterator[Any]:
        for mine in self._slices.of_rank(self._slices.grouped(batches), INDICES):
            indices, counts = unpadded(mine)
            real.append(counts)
            yield indices

    def __len__(self) -> int:
        return self._slices.length_of(self._batches)


class OwnData(Slices):
    """Data that differs from rank to rank already. An epoch can be continued by as many ranks as began it only.

    A rank that runs out before the others repeats its last batch as `Padding`; with ``end`` the epoch is over for all of them
    instead. Raises ValueError on all ranks if one has no batch at all.
    """

    own = True

    def __init__(self, data: Iterable[Any], strategy: Strategy, end: bool) -> None:
        super().__init__((strategy.data_ranks, "batches"))
        self._strategy, self._end = strategy, end
        #: Batches of this rank's data in this epoch.
        self._read = 0
        lengths = strategy.all_gather_object(known_length(data))
        self._length = None if None in lengths else min(lengths) if end else max(lengths)

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """See :meth:`hocket.data.Slices.slice`."""
        self._read = 0
        return self._together(batches, next(batches) if repeat else _END)

    def read(self, yielded: int) -> int:
        """See :meth:`hocket.data.Slices.read`."""
        return self._read

    def resumed(self, read: int) -> None:
        """See :meth:`hocket.data.Slices.resumed`."""
        self._read = read

    def to_skip(self, read: int) -> tuple[int, bool]:
        """See :meth:`hocket.data.Slices.to_skip`: a rank whose data has ended repeats its last batch, which is read in case."""
        return max(read - 1, 0), read > 0

    def _together(self, batches: Iterator[Any], batch: Any) -> Iterator[Any]:
        strategy, more = self._strategy, True
        while True:
            if more:
                read = next(batches, _END)
                more = read is not _END
                self._read += more
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

    def length(self, batches: int) -> int:
        """See :meth:`hocket.data.Slices.length`."""
        if self._length is None:
            raise TypeError("How many batches an epoch has is not known: the data of a rank does not say.")
        return self._length


_END = object()


class _FromRank0:
    """What a sampler yields on rank 0, on every rank, by giving it rank 0's random numbers: one broadcast an epoch.

    Rank 0's sampler finds the random numbers that it would find without the others, so that one seed gives the same global
    batches for any number of ranks. The other ranks' own random numbers, which augment and drop out, are left alone.
    """

    #: Samplers that keep drawing get a private stream here.
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
            return items, skip_items(items, skip)
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
            # With rank 0's data the first draw is a draw like any other; later ones are in a private stream, which training
            # on no rank advances.
            if not (begins and self._strategy.data_rank == 0):
                seeding.restore(own)


def _generators(*owners: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers have for themselves."""
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
