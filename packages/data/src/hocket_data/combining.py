"""The ways to combine several loaders, and the position in each of them."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from hocket.data.adapters import as_recorded
from hocket.data.errors import DataError
from hocket.data.source import Source, empty

#: The parts of a batch by the name of their loader.
Parts = dict[str, Any]

END: Any = object()


class Member:
    """One of several loaders: its source, and the position in it."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source = name, source
        #: Number of epochs that this loader began, and whether ``set_epoch`` receives it.
        self.epochs, self.numbered = 0, False
        #: The rest of its current epoch; None if that has ended.
        self.batches: Iterator[Any] | None = None
        #: Batches of its current epoch that were read, and that were yielded together with those of the others.
        self.read = self.yielded = 0
        #: Whether it has ended at least once in the current epoch of all loaders.
        self.ended = False

    def begin(self) -> None:
        """Begin an epoch of this loader."""
        self.batches = self.source.begin(self.epochs if self.numbered else None)
        self.epochs += 1
        self.read = self.yielded = 0

    def next(self) -> Any:
        """Return the next batch, or `END`."""
        item = END if self.batches is None else next(self.batches, END)
        if item is END:
            self.batches, self.ended = None, True
        else:
            self.read += 1
        return item

    def cycle(self) -> Any:
        """Return the next batch, after the last one the first of another epoch. Raises DataError if there is none."""
        item = self.next()
        if item is END:
            self.begin()
            item = self.next()
        if item is END:
            raise self.empty()
        return item

    def empty(self) -> DataError:
        """Return the error for a loader without batches."""
        return empty(self.source.data, f"Loader '{self.name}'", "train_data")

    def position(self, between: bool) -> dict[str, Any]:
        """Return the position as a tree; ``between``: between two epochs of all loaders.

        Raises DataError after an exception, if this loader was read before another one raised and has only its own state.
        """
        in_progress = not between and self.batches is not None
        position = self.source.position(self.yielded if in_progress else None)
        if in_progress and self.read > self.yielded and ("own" in position or position.get("of_rank")):
            raise DataError(f"loader '{self.name}' was read before another one raised, so its state is a batch ahead")
        return {
            "name": self.name,
            "position": position,
            "epochs": self.epochs,
            "in_progress": in_progress,
            "yielded": self.yielded if in_progress else 0,
            "ended": self.ended and not between,
        }

    def load(self, at: Mapping[str, Any]) -> None:
        """Continue at a position in the middle of an epoch of all loaders."""
        self.source, self.batches = as_recorded(self.source, at["position"]["kind"]), None
        self.epochs, self.ended, self.read, self.yielded = at["epochs"], at["ended"], at["yielded"], at["yielded"]
        if at["in_progress"]:
            self.batches = self.source.begin(self.epochs - 1 if self.numbered else None, at["position"])
        else:
            self.source.restore(at["position"])


def cycle(members: Sequence[Member]) -> Iterator[Parts]:
    """Yield a batch of each loader until each has ended once.

    In each round, loaders in their first epoch are read first: if all of them end, no batch was read in vain.
    """
    while True:
        parts = {each.name: each.next() for each in members if not each.ended}
        if all(each.ended for each in members):
            return
        yield {each.name: each.cycle() if parts.get(each.name, END) is END else parts[each.name] for each in members}


def shortest(members: Sequence[Member]) -> Iterator[Parts]:
    """Yield a batch of each loader until the first has ended, as ``zip`` does."""
    while True:
        parts: Parts = {}
        for each in members:
            parts[each.name] = each.next()
            if each.ended:
                if not each.read:
                    raise each.empty()
                return
        yield parts


def in_turn(members: Sequence[Member], turn: int) -> Iterator[Parts]:
    """Yield a batch of one loader after the other, beginning with number ``turn``, until all have ended."""
    while not all(each.ended for each in members):
        each = members[turn]
        turn = (turn + 1) % len(members)
        if (part := each.next()) is not END:
            yield {each.name: part}


def weighted(members: Sequence[Member], weights: Mapping[str, float], seed: str, done: int) -> Iterator[Parts]:
    """Yield a batch of a loader drawn by its weight, without end; the first ``done`` choices are skipped."""
    limits = list(accumulate(weights[each.name] for each in members))
    generator = random.Random(
        seed
    )  # of its methods only random() is guaranteed to stay the same in later versions of Python
    for _ in range(done):
        generator.random()
    while True:
        each = members[bisect(limits, generator.random() * limits[-1], hi=len(limits) - 1)]
        yield {each.name: each.cycle()}
