"""The indices of a pass, from its beginning or from its middle, without loading what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hocket.data.generators import DataGenerators
from hocket.training import seeding

#: Samplers that draw from the global random numbers at most once a pass, when they are asked for the first index.
DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)


def draws_once(sampler: Any) -> bool:
    """Whether this is one of :data:`DRAW_ONCE`, or torch's BatchSampler over one; subclasses may do anything."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(inner) in DRAW_ONCE or getattr(inner, "own_stream", False)


def after(sampler: Any, skip: int) -> tuple[Iterator[Any], int]:
    """What a sampler that :func:`draws_once` yields after ``skip`` items, and how many these were: it may have fewer."""
    if getattr(sampler, "own_stream", False):
        return sampler.after(skip)
    if type(sampler) is not BatchSampler or not skip:
        items = iter(sampler)
        return items, pass_over(items, skip)
    size = sampler.batch_size
    indices, left_out = after(sampler.sampler, skip * size)
    done = left_out // size if sampler.drop_last else -(-left_out // size)
    return iter(BatchSampler(indices, size, sampler.drop_last)), done  # type: ignore[arg-type]


def pass_over(items: Iterator[Any], number: int) -> int:
    """Leave out the next ``number`` items, and return how many there were.

    With the first one torch's samplers draw a list, and then yield from that: millions of its items are left out at once.
    """
    done = sum(1 for _ in islice(items, min(number, 1)))
    drawn: Any = getattr(items, "gi_yieldfrom", items)
    if type(drawn) in _LISTED and (ahead := min(number - done, length_hint(drawn))):
        _, _, position = drawn.__reduce__()  # as pickle has it; Python 3.12 moves a range and not its position
        drawn.__setstate__((position or 0) + ahead)
        done += ahead
    return done + sum(1 for _ in islice(items, number - done))


_LISTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class Indices:
    """Stands in for the index sampler of a DataLoader while a pass begins, and remembers what is needed to begin it again.

    A pass is a function of the random numbers that its sampler found when it was asked for the first time. So a sampler that
    goes on drawing from the global generators does so from a stream of its own, which models on no device move on: after the
    first item it continues where the sampler itself left it.

    Args:
        sampler: what yields indices, or lists of them.
        sources: the generators that it may draw from.
        first: the random numbers to begin with, as :attr:`first`; None for those that are there.
        skip: how many items to leave out.
    """

    def __init__(
        self, sampler: Any, sources: DataGenerators, first: dict[str, Any] | None = None, skip: int = 0
    ) -> None:
        self._sampler = sampler
        self._sources = sources
        self._given = first
        self._skip = skip
        self._iterator: Iterator[Any] | None = None
        self._stream: dict[str, Any] | None = None
        self._own_stream = not draws_once(sampler)
        #: What was found when the first item was asked for: global random numbers and those of the sources, as a tree.
        self.first: dict[str, Any] | None = None
        #: Items asked for, and whether there were no more.
        self.asked = 0
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self  # a DataLoader may do this twice a pass before it asks for anything

    def __len__(self) -> int:
        return len(self._sampler)

    def __next__(self) -> Any:
        self.begin()
        item = self._next()
        self.asked += 1
        return item

    def begin(self) -> None:
        """Draw what is drawn first, and leave out what is to be left out. Does nothing the second time."""
        if self._iterator is not None:
            return
        if self._given is not None:
            seeding.restore(seeding.from_tree(self._given["global"]))
            self._sources.restore(self._given["sources"])
        self.first = {"global": seeding.to_tree(seeding.capture(devices=False)), "sources": self._sources.capture()}
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
        if self._stream is None:  # a draw like any other
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
