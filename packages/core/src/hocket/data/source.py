"""The protocol of data: batches that can be iterated from the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

from hocket.data.errors import DataError

#: A position in data as a tree: dicts with string keys, lists, tensors, numbers, strings, bytes and None.
Position = dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """The batches that one rank computes on, epoch by epoch, and the position in them.

    **Random numbers.** ``begin()`` draws from the process's global generators exactly what ``iter(data)`` draws in a plain
    loop, at the same point. ``begin(at=…)`` does not change the global generators: a checkpoint holds those of the run, which
    are restored separately.

    **Positions** are taken between two batches of an epoch, or between two epochs, and for checkpoints only: they may be
    costly, because worker processes are queried. ``hocket.testkit.SourceConformance`` checks an adapter.

    Example:
        >>> from hocket.data import Source, adapt
        >>> isinstance(adapt([1, 2, 3]), Source)
        True
    """

    #: The kind of data, recorded in positions: on resume the adapter of this kind is used if it can serve the data.
    kind: ClassVar[str]
    #: The underlying data.
    data: Any

    def begin(self, epoch: int | None = None, at: Position | None = None) -> Iterator[Any]:
        """Return an iterator over an epoch, or over the rest of the epoch in which the position ``at`` was taken.

        It yields batches, or `hocket.data.batches.Padding` where this rank has no slice of one. ``set_epoch`` of
        samplers and data sets is called with ``epoch``. ``at`` may have ``earlier``: batches of earlier epochs, for an
        iterator that continues in the next. Raises DataError if `compatible` refuses ``at``.
        """
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over an epoch without positions, for `hocket.Runtime`."""
        ...

    def position(self, batches: int | None = None) -> Position:
        """Return the position after ``batches`` batches of the current epoch were yielded; None: between two epochs.

        It has the ``kind``; everything else is up to the adapter.
        """
        ...

    def restore(self, at: Position) -> None:
        """Have the next epoch begin as after ``at``, a position between two epochs."""
        ...

    def compatible(self, at: Position) -> str:
        """Return why the epoch of the position ``at`` cannot be continued with this data, or an empty string."""
        ...

    def reshare(self, positions: Sequence[Position], ranks: int) -> Position:
        """Return this rank's position from those of a run with another world size; ``ranks`` is the current one.

        Raises DataError if ranks read different data, and were in the middle of an epoch.
        """
        ...

    def length(self) -> int | None:
        """Return the number of batches in an epoch, or None if it is unknown. Never iterates."""
        ...

    def close(self) -> None:
        """End the iteration in progress and all worker processes at once. The next ``begin`` starts them anew."""
        ...


@contextmanager
def one_epoch(source: Source) -> Iterator[Iterator[Any]]:
    """Yield an iterator over a new epoch; an exception inside ends worker processes at once.

    Workers that the garbage collector ends hold up the process for five seconds each.
    """
    batches = source.begin()
    try:
        yield batches
    except BaseException as error:
        source.close()
        from hocket.help import failures  # only needed for error messages

        failures.explain(error, "collate")
        raise


def underlying(data: object) -> Any:
    """Return the underlying data of the object that a strategy's ``prepare_data`` returned."""
    return data.data if isinstance(data, Source) else data


def known_length(data: Any, limit: int | None = None) -> int | None:
    """Return ``len(data)``, at most ``limit``, or None if the data has no length."""
    try:
        known = len(data)
    except (TypeError, NotImplementedError):
        return None
    return known if limit is None else min(known, limit)


def empty(data: Any, what: str, about: str, of: str = "batch") -> DataError:
    """Return the error for data that yielded no batch or sample: ``what`` names them, and ``about`` is their argument."""
    dataset, once = getattr(data, "dataset", data), isinstance(data, Iterator)
    samples = None if once else known_length(dataset)
    over = "" if dataset is data else f" over {type(dataset).__name__}"
    kind = f"{type(data).__name__}{over}{'' if samples is None else f' of length {samples}'}"
    why = ": it is an iterator that is exhausted" if once else ""
    why += ". Check what it is made of, and that it starts anew each time, as a list or a DataLoader does."
    if samples and getattr(data, "drop_last", False):
        why = ": «drop_last=True» drops its only batch. Write «drop_last=False», or a smaller batch size."
    return DataError(f"{what} ({kind}) yielded no {of}{why}", about=about)


def limited(data: object, limit: float | None, argument: str) -> int | None:
    """Return the number of batches that ``limit`` allows: itself, or for a float that fraction of ``data``, at least one.

    Args:
        data: a source, or other data with batches.
        argument: the Trainer's argument, for the message.

    Raises DataError for a fraction of data without a length.
    """
    if not isinstance(limit, float):
        return limit
    length = data.length() if isinstance(data, Source) else known_length(data)
    if length is None:
        raise DataError(
            f"«{argument}={limit}» is a fraction of all batches, but the {type(underlying(data)).__name__} does not say how "
            f"many it has. Give a number, such as «{argument}=100»."
        )
    from fractions import Fraction

    return max(int(length * Fraction(str(limit))), 1)


def set_epoch(data: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its samplers and its data set, once for each object that has it."""
    for owner in epoch_owners(data):
        owner.set_epoch(epoch)


def epoch_owners(data: object) -> Iterator[Any]:
    """Yield the objects whose ``set_epoch`` is called: a loader, its samplers and its data set."""
    data, done = underlying(data), set()
    for owner in (data, *(getattr(data, name, None) for name in ("batch_sampler", "sampler", "dataset"))):
        for candidate in (owner, getattr(owner, "sampler", None), getattr(owner, "dataset", None)):
            if callable(getattr(candidate, "set_epoch", None)) and id(candidate) not in done:
                done.add(id(candidate))
                yield candidate
