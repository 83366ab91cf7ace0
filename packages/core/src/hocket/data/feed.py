"""The training data as the loop takes it: batch by batch, one pass after another, across fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hocket.data.batches import Padding

_ENDLESS = (itertools.cycle, itertools.repeat, itertools.count)


class DataError(ValueError):
    """Training data that does not yield what a run needs."""


def length(data: Iterable[Any], limit: int | None = None) -> int | None:
    """Batches in one pass over ``data``, at most ``limit``, or None where the data does not say."""
    try:
        known = len(data)  # type: ignore[arg-type]  # that it may have none is what this is about
    except (TypeError, NotImplementedError):
        return None
    return known if limit is None else min(known, limit)


@contextmanager
def one_pass(data: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator over ``data``; what raises inside ends the worker processes of a DataLoader at once.

    Left to the garbage collector, they would hold up the process for five seconds each.
    """
    batches = iter(data)
    try:
        yield batches
    except BaseException:
        _end_workers(data, batches)
        raise


def _end_workers(data: Any, batches: Iterator[Any] | None) -> None:
    for iterator in (batches, getattr(data, "_iterator", None), getattr(batches, "_base_iter", None)):
        if shutdown := getattr(iterator, "_shutdown_workers", None):
            shutdown()
    if getattr(data, "_iterator", None) is not None:
        data._iterator = None  # else persistent workers that are gone are asked again


class Feed:
    """Hands out batches; a pass that a fit leaves unfinished is continued by the next.

    Args:
        data: any iterable of batches that can be iterated once an epoch.
        limit: at most so many batches an epoch.
        overfit: keep the first so many batches and repeat only them, in the same order.
    """

    def __init__(self, data: Iterable[Any], limit: int | None = None, overfit: int | None = None) -> None:
        self._data = list(itertools.islice(data, overfit)) if overfit else data
        self._limit, self._overfit = limit, overfit
        self._batches: Iterator[Any] | None = None
        self._handed_out = 0
        self._source = getattr(data, "loader", data)  # a strategy's share of the user's
        self._once = isinstance(self._source, Iterator)
        #: Batches in a pass, or None while that is not known; learned from the first pass that ends.
        self.length = length(self._data, limit)

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._batches is not None

    @property
    def endless(self) -> bool:
        """Whether the data certainly never ends; not every endless iterable can be told."""
        return isinstance(self._source, _ENDLESS) and self._limit is None and not self._overfit

    def start(self, epoch: int) -> None:
        """Begin a pass; samplers and data sets that want to know the epoch are told (``set_epoch``)."""
        told: set[int] = set()
        for owner in (
            self._data,
            *(getattr(self._data, name, None) for name in ("batch_sampler", "sampler", "dataset")),
        ):
            for candidate in (owner, getattr(owner, "sampler", None)):
                set_epoch = getattr(candidate, "set_epoch", None)
                if callable(set_epoch) and id(candidate) not in told:
                    told.add(id(candidate))
                    set_epoch(epoch)
        self._batches = iter(self._data)
        self._handed_out = 0

    def next(self) -> tuple[Any, bool] | None:
        """The next batch, and whether it counts (see `Padding`); None at the end of the pass."""
        assert self._batches is not None, "start comes first"
        if self._handed_out != self._limit:
            for batch in self._batches:
                self._handed_out += 1
                return (batch.batch, False) if isinstance(batch, Padding) else (batch, True)
        if not self._handed_out:
            self.close()
            raise DataError(self._nothing())
        self.length = self._handed_out
        # An iterator that goes on where the last pass was cut off is what some people mean by an epoch of a stream.
        self._batches = None
        return None

    def close(self) -> None:
        """Forget the pass under way and end the worker processes of a DataLoader that iterates."""
        batches, self._batches = self._batches, None
        _end_workers(self._data, batches)

    def _nothing(self) -> str:
        kind = type(self._source).__name__
        if self._once:
            return (
                f"The training data ({kind}) yielded no batch: it is an iterator, which can be iterated once, and it is "
                "exhausted. Pass something that starts anew each time, such as a list or a DataLoader."
            )
        return (
            f"The training data ({kind}) yielded no batch. Check that the data set is not empty, and that drop_last=True "
            "does not drop its only batch."
        )
