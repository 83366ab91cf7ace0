"""Per-rank slices of global batches: every sample on exactly one rank, and the same number of training batches on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from hocket import Strategy
from hocket.basics import seeding
from hocket.data.adapters import adapt
from hocket.data.batches import Padding, count, slice_samples, unpadded
from hocket.data.global_batches import resized
from hocket.data.loaders import batch_size, by_index, sampler_name, with_sampler
from hocket.data.rank_slices import Slices
from hocket.data.samplers import Order, after, draws_once, skip_items
from hocket.data.source import Source, known_length
from hocket.data.sources.by_index import ByIndex
from hocket.errors import WrongType, WrongValue


def bounds(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and stop of a rank's contiguous slice of ``samples``. Sizes differ by at most one; lower ranks get more."""
    each, left = divmod(samples, world_size)
    start = rank * each + min(rank, left)
    return start, start + each + (rank < left)


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler divides samples over ranks itself, as torch's DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


class Kind(NamedTuple):
    """How a kind of global batch is divided: its length, and how to select a range."""

    size: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]


INDICES = Kind(len, lambda indices, start, stop: indices[start:stop])
SAMPLES = Kind(lambda batch: count(batch).samples, slice_samples)
#: A list of batches, one per rank.
BATCHES = Kind(len, lambda batches, start, stop: batches[start])


class RankSlices(Slices):
    """This rank's slices of global batches, which every rank reads in full.

    Raises ValueError on all ranks if training ranks are seen to read batches of different sizes or numbers.

    Args:
        divide: whether the data's batches are global batches. Otherwise each is one rank's batch, and one per rank in
            sequence makes a global batch.
        pad: whether a rank without a slice gets `Padding`; otherwise it gets nothing.
        end: whether the epoch ends before a global batch in which some rank has no slice.
        check: slices that check the batches as they are read.
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
        """Group batches into global batches."""
        return batches if self.divide else iter(lambda: list(islice(batches, self.each)), [])

    def of_rank(self, groups: Iterator[Any], divided: Kind) -> Iterator[Any]:
        """Yield this rank's slices of global batches; ``divided`` is the kind of the global batches."""
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
        """Yield global batches; raise on every rank if they differ in size between ranks, or if some rank has none left."""
        kind, unit = (SAMPLES, "samples") if self.divide else (BATCHES, "batches")
        while True:
            read = next(groups, _END)
            size = 0 if read is _END else kind.size(read)
            least, most = self.strategy.all_reduce(torch.tensor([size, -size]), "min").tolist()
            if least != -most:
                raise WrongValue(
                    f"Ranks read different data: at the same place one has {least} {unit} and another one {-most} (0 means "
                    "that its data has ended). Every rank must read the same and keeps its slice. If the data is already "
                    "divided over ranks, write «strategy={'ddp': {'split_data': False}}»."
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
        raise WrongType("The number of batches with a slice for every rank is not known before they are read.")

    def length_of(self, sampler: Any) -> int:
        """Return :meth:`length` for batches of indices, of which the last may have too few for every rank."""
        if not (self.divide and self.end and isinstance(sampler, BatchSampler | Order)):
            return self.length(len(sampler))
        samples = sampler.samples if isinstance(sampler, Order) else len(sampler.sampler)  # type: ignore[arg-type]
        last = samples - (len(sampler) - 1) * sampler.batch_size
        return len(sampler) - (0 < last < self.strategy.data_ranks)


def sliced(
    loader: Iterable[Any], strategy: Strategy, global_batch: int | None, *, train: bool, pad: bool, end: bool
) -> Source:
    """Return this rank's slices of data that every rank is given; see `hocket.hookspecs.StrategyHooks.prepare_data`."""
    ranks = strategy.data_ranks
    if train and global_batch is None and (size := batch_size(loader)) is not None:
        global_batch = size * ranks  # in samples and not in batches, so that the last one is divided evenly
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
    """Load only this rank's slice of each global batch from a DataLoader over a map-style data set.

    Everything but the sampler is the loader's own: workers, collation, pinning. Batches arrive in order regardless of
    ``in_order``: otherwise ranks would combine samples of different global batches.
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
            # The sampler draws from it too. It must draw the same on all ranks, but workers must augment differently.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
            vars(self.data)["generator"] = torch.Generator().manual_seed(seed + self._rank)
        self._sampler.real = real = deque[bool]()
        return _marked(super().iterate(), real)


def _marked(batches: Iterator[Any], real: deque[bool]) -> Iterator[Any]:
    """Yield batches, marked as padding where this rank has no slice."""
    for batch in batches:
        yield batch if real.popleft() else Padding(batch)


class _SlicedSampler(Order):
    """A batch sampler of this rank's slice of each global batch of indices, or a sampler of this rank's pre-made batches."""

    def __init__(self, batches: Any, loader: DataLoader[Any], slices: RankSlices) -> None:
        if isinstance(batches, Order) and slices.divide:
            batches = batches.of_rank(slices.strategy.data_rank, slices.strategy.data_ranks)
        self._batches, self._slices = batches, slices
        generators = _generators(loader, batches, getattr(batches, "sampler", None))
        self._same = _FromRank0(batches, generators, slices.strategy)
        #: For each batch of the latest epoch that was sampled and not yet yielded: whether it is real, not padding.
        self.real: deque[bool] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(iter(self._same), self.real)

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """See :meth:`hocket.data.Order.after`. Each global batch has one slice for this rank."""
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
    """Data that differs between ranks. An epoch can be continued only with the world size that began it.

    A rank that runs out before the others repeats its last batch as `Padding`; with ``end`` the epoch ends on all ranks
    instead. Raises ValueError on all ranks if one has no batch at all.
    """

    own = True

    def __init__(self, data: Iterable[Any], strategy: Strategy, end: bool) -> None:
        super().__init__((strategy.data_ranks, "batches"))
        self._strategy, self._end = strategy, end
        #: Number of batches read from this rank's data in this epoch.
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
        """See :meth:`hocket.data.Slices.to_skip`. The last batch is read again: a rank whose data has ended repeats it."""
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
                raise WrongValue(
                    f"The training data of {empty} of {strategy.world_size} ranks yielded no batch, so these ranks have "
                    "nothing to compute on while the others train. Divide the data so that every rank has a batch."
                )
            if self._end and left < strategy.world_size:
                return
            yield batch if more else Padding(batch)

    def length(self, batches: int) -> int:
        """See :meth:`hocket.data.Slices.length`."""
        if self._length is None:
            raise WrongType("The number of batches of an epoch is not known: the data of a rank has no length.")
        return self._length


_END = object()


class _FromRank0(Order):
    """Make a sampler yield the same on every rank as on rank 0, by broadcasting rank 0's RNG state once per epoch.

    Rank 0's sampler draws as in a single process, so that a seed gives the same global batches for any world size. The other
    ranks' own random numbers, used for augmentation and dropout, are not affected.

    Samplers that keep drawing get a private RNG stream here.
    """

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
        """See :meth:`hocket.data.Order.after`."""
        if not draws_once(self._sampler):
            items = iter(self)
            return items, skip_items(items, skip)
        with self._drawing(None):
            items, done = after(self._sampler, skip)
            first = [] if skip else list(islice(items, 1))  # the sampler draws its random numbers with the first item
        return chain(first, items), done

    @contextmanager
    def _drawing(self, stream: dict[str, Any] | None) -> Iterator[None]:
        """Draw from ``stream`` inside; at its beginning, from rank 0's random numbers."""
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
            # The first draw advances rank 0's generators, as in a single process. Later ones use a private stream, which
            # training does not advance on any rank.
            if not (begins and self._strategy.data_rank == 0):
                seeding.restore(own)


def _generators(*owners: Any) -> list[torch.Generator]:
    """Return the private generators of a loader and its samplers."""
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
