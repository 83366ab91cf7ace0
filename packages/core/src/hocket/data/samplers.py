"""Resume samplers: draw the indices of an epoch from its beginning or its middle, without loading the samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from typing import Any, Self

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hocket.basics import seeding
from hocket.data.generators import DataGenerators


class Order:
    """The base of batch samplers that can begin at any batch of an epoch without drawing the batches before it.

    Pass one to a DataLoader as ``batch_sampler=``. A resumed run calls `after`. A run with ``global_batch=``, or with several
    ranks, sets `batch_size` of a shallow copy to the size of a global batch, and each rank loads its contiguous part of each
    list. ``set_epoch`` is called at the beginning of each epoch, if there is one. Batches may depend on the seed of the run by
    ``torch.initial_seed()``, which is that of rank 0 on all ranks, and on nothing that is drawn.

    Example:
        >>> import torch
        >>> import hocket.data
        >>> class Backwards(hocket.data.Order):
        ...     batch_size, samples = 2, 4
        ...     def __len__(self): return 4 // self.batch_size
        ...     def after(self, skip):
        ...         done = min(skip, len(self))
        ...         lists = ([3 - i * self.batch_size - k for k in range(self.batch_size)] for i in range(done, len(self)))
        ...         return lists, done
        >>> list(torch.utils.data.DataLoader(range(4), batch_sampler=Backwards()))
        [tensor([3, 2]), tensor([1, 0])]
        >>> next(Backwards().after(1)[0])
        [1, 0]
    """

    #: Samples in a list, of which the last may have fewer; and in all lists of an epoch.
    batch_size: int
    samples: int
    #: All that the order depends on besides the seed and the epoch. A position is refused where it differs.
    fingerprint: str | None = None

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """Return an iterator over the lists of indices after the first ``skip``, and how many of them there were."""
        raise NotImplementedError

    def of_rank(self, rank: int, ranks: int) -> Self:
        """Return the same order, told which part of each list this process loads, so that it can fetch ahead."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)[0]

    def __len__(self) -> int:
        raise NotImplementedError


#: Samplers whose order is random.
DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: Samplers that draw from the global generators at most once an epoch, for the first index.
DRAW_ONCE = (SequentialSampler, *DRAWN, list, tuple, range)


def draws_once(sampler: object) -> bool:
    """Whether this is one of :data:`DRAW_ONCE`, an `Order`, or torch's BatchSampler over one; subclasses may do anything."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(inner) in DRAW_ONCE or isinstance(inner, Order)


def after(sampler: Any, skip: int) -> tuple[Iterator[Any], int]:
    """Return an iterator over a sampler that :func:`draws_once` after ``skip`` items, and how many of them there were."""
    if isinstance(sampler, Order):
        return sampler.after(skip)
    if type(sampler) is not BatchSampler or not skip:
        items = iter(sampler)
        return items, skip_items(items, skip)
    size = sampler.batch_size
    indices, skipped = after(sampler.sampler, skip * size)
    done = skipped // size if sampler.drop_last else -(-skipped // size)
    return iter(BatchSampler(indices, size, sampler.drop_last)), done


def skip_items(items: Iterator[Any], number: int) -> int:
    """Skip the next ``number`` items, and return how many there were.

    For the first item torch's samplers draw a list, and then yield from it: millions of its items are skipped at once.
    """
    skipped = _skip_one_by_one(items, min(number, 1))
    skipped += _skip_at_once(getattr(items, "gi_yieldfrom", items), number - skipped)
    return skipped + _skip_one_by_one(items, number - skipped)


def _skip_one_by_one(items: Iterator[Any], number: int) -> int:
    return sum(1 for _ in islice(items, number))


def _skip_at_once(items: Any, number: int) -> int:
    """Move the position of an iterator over a list, tuple or range as pickle would; 0 for any other iterator."""
    number = min(number, length_hint(items)) if type(items) in _LISTED else 0
    if number:
        position = items.__reduce__()[2] or 0  # Python 3.12 changes a range iterator's range, not its position
        items.__setstate__(position + number)
    return number


_LISTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class Indices:
    """Replaces the index sampler of a DataLoader while an epoch begins, and records the RNG state to begin it again.

    An epoch is determined by the RNG state in which its sampler is asked for the first item. Samplers that keep drawing from
    the global generators get a private RNG stream after the first item, so that model code cannot disturb it.

    Args:
        sampler: yields indices, or lists of them.
        generators: the generators that it may draw from.
        first: the RNG state to begin with, as :attr:`first`; None for the current state.
        skip: the number of items to skip.
        ahead: the number of items that worker processes ask for before the first batch is yielded.
    """

    def __init__(
        self,
        sampler: Any,
        generators: DataGenerators,
        first: dict[str, Any] | None = None,
        skip: int = 0,
        ahead: int = 0,
    ) -> None:
        self._sampler = sampler
        self._generators = generators
        self._given = first
        self._skip = skip
        self._iterator: Iterator[Any] | None = None
        self._stream: dict[str, Any] | None = None
        self._own_stream = not draws_once(sampler)
        #: The RNG state in which the first item was asked for, global and of the generators, as a tree.
        self.first: dict[str, Any] | None = None
        #: Number of items drawn, and whether the sampler is exhausted.
        self.asked = 0
        self.ended = False
        #: The latest items with their numbers.
        self._recent: deque[tuple[int, Any]] = deque(maxlen=ahead + 2)

    def __iter__(self) -> Iterator[Any]:
        return self  # a DataLoader may call iter() twice an epoch before it draws an item

    def __len__(self) -> int:
        return len(self._sampler)

    def __next__(self) -> Any:
        self.begin()
        item = self._next()
        self._recent.append((self.asked, item))
        self.asked += 1
        return item

    def recent(self, number: int) -> Any:
        """Return the item with this number in the epoch, or None if it is not one of the latest."""
        return next((item for at, item in self._recent if at == number), None)

    def begin(self) -> None:
        """Start the sampler's iterator and skip items. Does nothing the second time."""
        if self._iterator is not None:
            return
        if self._given is not None:
            seeding.restore(seeding.from_tree(self._given["global"]))
            self._generators.restore(self._given["sources"])
        self.first = {"global": seeding.to_tree(seeding.capture(devices=False)), "sources": self._generators.capture()}
        if not self._own_stream:
            self._iterator, self.asked = after(self._sampler, self._skip)
            return
        self._iterator = iter(self._sampler)
        for _ in range(self._skip):
            try:
                self._next()
            except StopIteration:
                break
            self.asked += 1

    def _next(self) -> Any:
        assert self._iterator is not None
        if self.ended:
            raise StopIteration
        try:
            return next(self._iterator) if not self._own_stream else self._next_of_stream()
        except StopIteration:
            self.ended = True
            raise

    def _next_of_stream(self) -> Any:
        assert self._iterator is not None
        if self._stream is None:  # the first item is drawn from the global generators
            item = next(self._iterator)
            self._stream = seeding.capture(devices=False)
            return item
        own = seeding.capture(devices=False)
        seeding.restore(self._stream)
        try:
            item = next(self._iterator)
            self._stream = seeding.capture(devices=False)
        finally:
            seeding.restore(own)
        return item
