"""The indices of a pass, from its beginning or from its middle, without loading what they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hocket import seeding
from hocket.data.sources import Sources

#: Samplers that draw from the global random numbers at most once a pass, when they are asked for the first index.
DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)


def draws_once(sampler: Any) -> bool:
    """Whether this is one of :data:`DRAW_ONCE`, or torch's BatchSampler over one; subclasses may do anything."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(inner) in DRAW_ONCE or getattr(inner, "own_stream", False)


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

    def __init__(self, sampler: Any, sources: Sources, first: dict[str, Any] | None = None, skip: int = 0) -> None:
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
        skip = self._skip
        if type(self._sampler) is BatchSampler and not self._own_stream and skip:
            # Fifty thousand batches of single indices are left out faster without making batches of them.
            sampler, size = self._sampler, self._sampler.batch_size
            indices = iter(sampler.sampler)
            left_out = sum(1 for _ in itertools.islice(indices, skip * size))
            self.asked = skip if left_out > (skip - 1) * size else left_out // size
            self._iterator = iter(BatchSampler(indices, size, sampler.drop_last))  # type: ignore[arg-type]
            return
        self._iterator = iter(self._sampler)
        for _ in range(skip):
            try:
                self._next()
            except StopIteration:
                break
            self.asked += 1
        if forget := getattr(self._sampler, "forget", None):
            forget()

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
