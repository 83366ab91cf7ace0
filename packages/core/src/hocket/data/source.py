"""The protocol of data: batches that can be iterated from the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

#: A position in data as a tree: dicts with string keys, lists, tensors, numbers, strings, bytes and None.
Position = dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """The batches that one rank computes on, epoch by epoch, and the position in them.

    **Random numbers.** ``begin()`` draws from the process's global generators exactly what ``iter(data)`` draws in a plain
    loop, at the same place. ``begin(at=…)`` leaves the global generators as it found them: a checkpoint holds those of the
    run, which are restored separately.

    **Positions** are taken between two batches of an epoch, or between two epochs. They may be costly to take (worker
    processes are asked), so that happens for checkpoints only. ``hocket.testkit.SourceConformance`` checks an adapter.

    Example:
        >>> from hocket.data import Source, adapt
        >>> isinstance(adapt([1, 2, 3]), Source)
        True
    """

    #: The kind of data, recorded in positions: on resume the adapter of this kind is used if it can serve the data.
    kind: ClassVar[str]
    #: What is iterated in the end.
    data: Any

    def begin(self, epoch: int | None = None, at: Position | None = None) -> Iterator[Any]:
        """Return an iterator over an epoch, or over the rest of the epoch in which the position ``at`` was taken.

        It yields batches, or `hocket.data.batches.Padding` where this rank has no slice of one. ``set_epoch`` of
        samplers and data sets is called with ``epoch``. ``at`` may have ``earlier``: batches of earlier epochs, for an
        iterator that continues in the next. Raises DataError if `compatible` refuses ``at``.
        """
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over an epoch of which no position will be asked, as `hocket.Runtime` does."""
        ...

    def position(self, batches: int | None = None) -> Position:
        """Return the position after so many batches of the epoch in progress were yielded; None: between two epochs.

        It has the ``kind``; all else is up to the adapter.
        """
        ...

    def restore(self, at: Position) -> None:
        """Have the next epoch begin as after ``at``, a position between two epochs."""
        ...

    def compatible(self, at: Position) -> str:
        """Return why the epoch in which ``at`` was taken cannot be continued over this data, or an empty string."""
        ...

    def reshare(self, positions: Sequence[Position], ranks: int) -> Position:
        """Return this rank's position out of those of another number of ranks than the ``ranks`` there are now.

        Raises DataError where ranks read different data, and were in the middle of an epoch.
        """
        ...

    def length(self) -> int | None:
        """Return the batches of an epoch, or None where that is not known. Never iterates."""
        ...

    def close(self) -> None:
        """End the iteration in progress and all worker processes at once. The next ``begin`` starts them anew."""
        ...


@contextmanager
def one_epoch(source: Source) -> Iterator[Iterator[Any]]:
    """Yield an iterator over a new epoch; an exception inside ends worker processes at once.

    Left to the garbage collector, they would hold up the process for five seconds each.
    """
    batches = source.begin()
    try:
        yield batches
    except BaseException:
        source.close()
        raise


def underlying(data: Any) -> Any:
    """Return what is iterated in the end, for what a strategy's ``prepare_data`` returned."""
    return data.data if isinstance(data, Source) else data


def known_length(data: Any, limit: int | None = None) -> int | None:
    """Return ``len(data)``, at most ``limit``, or None where the data does not say."""
    try:
        known = len(data)
    except (TypeError, NotImplementedError):
        return None
    return known if limit is None else min(known, limit)


def set_epoch(data: Any, epoch: int) -> None:
    """Call ``set_epoch`` of everything in a loader that has it, once each: loader, samplers and data set."""
    data, done = underlying(data), set()
    for owner in (data, *(getattr(data, name, None) for name in ("batch_sampler", "sampler", "dataset"))):
        for candidate in (owner, getattr(owner, "sampler", None), getattr(owner, "dataset", None)):
            method = getattr(candidate, "set_epoch", None)
            if callable(method) and id(candidate) not in done:
                done.add(id(candidate))
                method(epoch)
