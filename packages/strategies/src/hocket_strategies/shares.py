"""Global batches divided over ranks: every sample once, on one rank, and the same number of training batches everywhere."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from hocket import Strategy, seeding
from hocket.data.batches import Padding, count, slice_samples
from hocket.data.indices import draws_once
from hocket.data.passes import length, skipped


def share(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and stop of a rank's contiguous share of ``samples``. Shares differ by at most one; lower ranks get the larger."""
    each, left = divmod(samples, world_size)
    start = rank * each + min(rank, left)
    return start, start + each + (rank < left)


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler deals out samples to ranks by itself, as torch's DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


class Prepared:
    """Batches as one rank iterates them; what the user's data says about itself can still be asked of it."""

    #: How many batches of the data the next pass leaves out; Feed says so where it cannot leave out their indices.
    skip = 0

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        # The data's own pass begins here and not with the first batch: Feed begins it in the middle.
        skip, self.skip = self.skip, 0
        return self._shared(skipped(iter(self._data), skip))

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Feed asks for set_epoch, sampler, dataset. Dunders and _data would recurse while copying or unpickling.
        if name.startswith("__") or name == "_data":
            raise AttributeError(name)
        return getattr(self._data, name)

    @property
    def loader(self) -> Any:
        """What is iterated: for a DataLoader this rank's own one, whose data set may be exchanged."""
        return self._data

    @property
    def _iterator(self) -> Any:
        """The iterator that a DataLoader with persistent workers keeps; Feed ends it."""
        return getattr(self._data, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._data._iterator = value  # type: ignore[attr-defined]  # read from there, so it is there


class SharedLoader(Prepared):
    """A DataLoader over a map-style data set whose batches are the global ones; loads only this rank's share of each.

    Everything but the sampler is the loader's own: workers, collation, pinning. With ``pad``, as in training, a rank without
    a share of a batch loads its first sample as `Padding`; otherwise the batch is left out. Batches come in order whatever
    ``in_order`` says: ranks that met them in different orders would mix samples of different global batches.
    """

    def __init__(self, loader: DataLoader[Any], strategy: Strategy, pad: bool) -> None:
        mine = copy.copy(loader)
        self._shares = _Shares(loader.batch_sampler, loader, strategy, pad)
        # Past DataLoader.__setattr__, which forbids this. A new DataLoader would lose what subclasses add.
        vars(mine).update(batch_sampler=self._shares, in_order=True, _iterator=None)
        super().__init__(mine)
        self._rank = strategy.data_rank
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
    """Batch sampler: this rank's share of each batch of indices of another."""

    #: :func:`alike` gives samplers that go on drawing a stream of their own.
    own_stream = True

    def __init__(self, batches: Any, loader: DataLoader[Any], strategy: Strategy, pad: bool) -> None:
        self._batches = batches
        self._samplers = (batches, getattr(batches, "sampler", None))
        self._generators = _generators(loader, *self._samplers)
        self._strategy = strategy
        self._pad = pad
        #: Of each batch of the latest pass that was sampled and not yet handed out: whether it is a share at all.
        self.real: deque[bool] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._indices(self.real)

    def forget(self) -> None:
        """What was sampled so far will not be loaded."""
        self.real.clear()

    def _indices(self, real: deque[bool]) -> Iterator[list[Any]]:
        rank, world_size = self._strategy.data_rank, self._strategy.data_ranks
        for batch in alike(self._batches, self._generators, self._strategy):
            indices = list(batch)
            start, stop = share(len(indices), rank, world_size)
            if start < stop or (self._pad and indices):
                real.append(start < stop)
                yield indices[start:stop] or indices[:1]

    def __len__(self) -> int:
        batches = len(self._batches)
        if self._pad:
            return batches
        if type(self._batches) is not BatchSampler:
            raise TypeError(
                f"How many batches of {type(self._batches).__name__} this rank has a share of is not known."
            )
        # Only the last batch can be smaller than the others.
        full, last = divmod(len(self._batches.sampler), self._batches.batch_size)  # type: ignore[arg-type]
        rank = self._strategy.data_rank
        return full * (rank < self._batches.batch_size) + (not self._batches.drop_last and rank < last)


class SlicedBatches(Prepared):
    """Batches that every rank reads whole, and of which it keeps its share. Every rank must read the same ones.

    With ``pad`` a rank without a share of a batch gets `Padding`.
    Raises ValueError on all ranks where their sizes then show that ranks read different batches.
    """

    def __init__(self, data: Iterable[Any], strategy: Strategy, pad: bool) -> None:
        if isinstance(data, DataLoader) and data.batch_sampler is None:  # batch_size=None: a sample is a batch
            sampler, data = data.sampler, copy.copy(data)
            vars(data).update(sampler=_Alike(sampler, _generators(data, sampler), strategy), _iterator=None)
        super().__init__(data)
        self._strategy = strategy
        self._pad = pad

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        rank, world_size = self._strategy.data_rank, self._strategy.data_ranks
        for batch in _checked(batches, self._strategy) if self._pad else batches:
            samples = count(batch).samples
            start, stop = share(samples, rank, world_size)
            if start < stop:
                yield slice_samples(batch, start, stop, samples)
            elif self._pad:
                yield Padding(slice_samples(batch, 0, 1, samples))

    def __len__(self) -> int:
        if not self._pad:
            raise TypeError("Of how many batches this rank has a share is not known before they are read.")
        return len(self._data)  # type: ignore[arg-type]  # TypeError is what len() raises if it has none


class OwnBatches(Prepared):
    """Data that differs from rank to rank already. Training goes on until the last rank's data ends.

    A pass can be continued by as many ranks as began it only.

    A rank that runs out before the others repeats its last batch as `Padding`. Raises ValueError on all ranks if one has no
    batch at all.
    """

    of_rank = True
    #: Whether the next pass begins with a batch that was trained on already, and is here to be repeated only.
    hold = False
    #: Batches of this rank's data in this pass.
    read = 0

    def __init__(self, data: Iterable[Any], strategy: Strategy) -> None:
        super().__init__(data)
        self._strategy = strategy
        lengths = strategy.all_gather_object(length(data))
        self._length = None if None in lengths else max(lengths)

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
            somewhere, empty = strategy.all_reduce(torch.tensor([more, batch is _END]), "sum").tolist()
            if not somewhere:
                return
            if empty:
                raise ValueError(
                    f"The training data of {empty} of {strategy.world_size} ranks yielded no batch, so these ranks have "
                    "nothing to compute on while the others train. Divide the data so that every rank has a batch."
                )
            yield batch if more else Padding(batch)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("How many batches a pass has is not known: the data of a rank does not say.")
        return self._length


_END = object()


def _checked(batches: Iterator[Any], strategy: Strategy) -> Iterator[Any]:
    """The batches; an error on every rank if they differ in size, or if some rank has none left when another has."""
    while True:
        read = next(batches, _END)
        samples = 0 if read is _END else count(read).samples
        least, most = strategy.all_reduce(torch.tensor([samples, -samples]), "min").tolist()
        if least != -most:
            raise ValueError(
                f"Ranks read different data: at the same place one has a batch of {least} samples and another one of "
                f"{-most} (0 means that its data has ended). Every rank must read the same batches and keeps its share. If "
                "the data is divided over ranks already, write strategy={'ddp': {'split_data': False}}."
            )
        if read is _END:
            return
        yield read


class _Alike:
    """A sampler that draws the same indices on every rank."""

    own_stream = True

    def __init__(self, sampler: Any, generators: list[torch.Generator], strategy: Strategy) -> None:
        self._sampler = sampler
        self._generators = generators
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        return alike(self._sampler, self._generators, self._strategy)

    def __len__(self) -> int:
        return len(self._sampler)


def alike(sampler: Any, generators: list[torch.Generator], strategy: Strategy) -> Iterator[Any]:
    """What ``sampler`` yields on rank 0, on every rank, by giving it rank 0's random numbers: one broadcast a pass.

    Rank 0's sampler finds the random numbers that it would find without the others, so that one seed gives the same global
    batches for any number of ranks. The other ranks' own random numbers, which augment and drop out, are left alone.
    """
    plain = draws_once(sampler)
    iterator: Iterator[Any] | None = None
    shared: dict[str, Any] | None = None
    while True:
        if iterator is not None and plain:
            yield from iterator
            return
        own = seeding.capture(devices=False)
        if iterator is None:
            shared, states = strategy.broadcast_object((own, [generator.get_state() for generator in generators]))
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        seeding.restore(shared)  # type: ignore[arg-type]  # set in the first round
        first = iterator is None
        try:
            iterator = iter(sampler) if iterator is None else iterator
            item = next(iterator, _END)
            shared = seeding.capture(devices=False)
        finally:
            # With rank 0's data the first draw is a draw like any other; what a sampler draws later is in a stream of its own,
            # which training on no rank moves on.
            if not (first and strategy.data_rank == 0):
                seeding.restore(own)
        if item is _END:
            return
        yield item


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators of their own that a loader and its samplers draw from."""
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
