"""The base of all adapters: it handles random numbers, worker processes and per-rank slices for any data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ReferenceType, ref

from hocket.basics import seeding
from hocket.data import loaders
from hocket.data.errors import DataError
from hocket.data.generators import DataGenerators
from hocket.data.rank_slices import Slices
from hocket.data.samplers import skip_items
from hocket.data.source import Position, known_length, set_epoch
from hocket.data.workers import sheltered


class DataSource:
    """A `hocket.data.Source` that resumes by reading the past batches of the epoch again and discarding them.

    Adapters define ``kind`` and `serves`; those that need not read past batches again override `read`, or more.

    Args:
        data: the data to iterate.
        slices: this rank's slices of the batches.
        given: the user's data, if ``data`` is a changed copy; positions describe its generators and samplers.

    Example:
        >>> import hocket.data
        >>> class Countdown:
        ...     def __iter__(self): return iter((3, 2, 1))
        >>> class CountdownSource(hocket.data.DataSource):
        ...     kind = "countdown"
        ...     @classmethod
        ...     def serves(cls, data): return type(data).__name__ == "Countdown"
        >>> list(CountdownSource(Countdown()))
        [3, 2, 1]
    """

    kind: ClassVar[str] = ""
    #: If several adapters can serve the data, the one with the highest priority is used. Those of core are below 100.
    priority: ClassVar[int] = 100

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        self.data = data
        self.given = data if given is None else given
        self.slices = Slices() if slices is None else slices
        self._generators = DataGenerators(self.given)
        #: The RNG state in which this epoch began, and the one in which the living persistent workers were started.
        self._start: dict[str, Any] | None = None
        self._workers: dict[str, Any] | None = None
        #: The RNG state to start persistent workers in, if a checkpoint was taken while some were alive.
        self._start_workers_with: dict[str, Any] | None = None
        #: The iterator in progress, if it has worker processes.
        self._iterator: ReferenceType[Any] | None = None

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether this adapter can iterate ``data`` and restore positions in it."""
        raise NotImplementedError

    def read(self, done: int) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch after the first ``done``.

        Override it if those need not be read. ``done`` may exceed the number of batches.
        """
        batches, each = self.iterate(), self.slices.each
        groups, skipped = done // each, -(-skip_items(batches, done) // each)
        if skipped < groups:
            raise DataError(
                f"{groups} batches of the epoch are done, but the training data yields {skipped} now. Resume with the same "
                "data."
            )
        return batches

    def iterate(self) -> Iterator[Any]:
        """Return a new iterator over the data."""
        try:
            batches: Iterator[Any] = iter(self.data)
        except Exception as error:
            from hocket.help import failures

            failures.explain(error, "workers", self.data)
            raise
        self._iterator = ref(batches) if loaders.has_workers(batches) else None
        return batches

    # --- epochs

    def begin(self, epoch: int | None = None, at: Position | None = None) -> Iterator[Any]:
        """See :meth:`hocket.data.Source.begin`."""
        if epoch is not None:
            set_epoch(self.data, epoch)
        if at is None:
            return self._begin(0, None)
        if problem := self.compatible(at):
            raise DataError(problem)
        self._start_workers_with = at["workers"]
        read = at["read"]
        with seeding.preserved():
            if at["start"] is not None:
                self._put(at["start"])
            batches = self._continue(read + at.get("earlier", 0), at)
            self.slices.resumed(read)
        self._restore_generators(at)
        return batches

    def __iter__(self) -> Iterator[Any]:
        """See :meth:`hocket.data.Source.__iter__`."""
        return self.slices.slice(self.iterate())

    def _begin(self, read: int, at: Position | None) -> Iterator[Any]:
        self._start = self._random_numbers()
        alive = loaders.workers_alive(self.data)
        like, self._start_workers_with = None if alive else self._start_workers_with, None
        if like is not None:
            # Persistent workers draw a seed when they start, which the original epoch did not draw.
            self._put(like)
        batches = self._open(read, at, None if like is None else self._start)
        if not loaders.workers_alive(self.data):
            self._workers = None  # they end with the epoch
        elif not alive:
            self._workers = like or self._start
        return batches

    def _continue(self, read: int, at: Position) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch of ``at``. The RNG state is that in which the epoch began."""
        return self._begin(read, at)

    def _open(self, read: int, at: Position | None, begin_with: dict[str, Any] | None) -> Iterator[Any]:
        """Return an iterator after ``read`` batches. ``begin_with``: the RNG state of the epoch, set after workers start."""
        skip, repeat = self.slices.to_skip(read)
        with sheltered(self.data):
            batches = self.slices.slice(self.read(skip * self.slices.each), repeat)
        if begin_with is not None:
            self._put(begin_with)
        return batches

    def close(self) -> None:
        """See :meth:`hocket.data.Source.close`."""
        loaders.end_workers(self.data, None if self._iterator is None else self._iterator())
        self._iterator = self._workers = None

    def length(self) -> int | None:
        """See :meth:`hocket.data.Source.length`."""
        return known_length(self)

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises TypeError if it is unknown."""
        return self.slices.length(self.data_length())

    def data_length(self) -> int:
        """Return the number of batches of the data in an epoch, before slicing. Raises TypeError if it is unknown."""
        return len(self.data)

    def _batches(self) -> int | None:
        try:
            return self.data_length()
        except (TypeError, NotImplementedError):
            return None

    # --- positions

    def position(self, batches: int | None = None) -> Position:
        """See :meth:`hocket.data.Source.position`."""
        position: Position = {
            "kind": self.kind,
            "of_rank": self.slices.own,
            "batches": self._batches(),
            "drawn": {},
            "global_batch": list(self._global_batch()),
            "sources": self._generators.capture(),
            "workers": self._start_workers_with or self._workers,
        }
        if batches is not None:
            position |= {"start": self._start, "over": False, "read": self.slices.read(batches)}
        return position

    def restore(self, at: Position) -> None:
        """See :meth:`hocket.data.Source.restore`."""
        self._generators.restore(at.get("sources", {}))
        self._start_workers_with = at.get("workers")
        if at.get("earlier") and "own" not in at:
            self.read(at["earlier"] * self.slices.each)  # advance the iterator to the position

    def compatible(self, at: Position) -> str:
        """See :meth:`hocket.data.Source.compatible`."""
        if at["kind"] != self.kind:
            return (
                f"The checkpoint was taken in the middle of an epoch over data of the kind '{at['kind']}', but "
                f"{type(self.data).__name__} is of the kind '{self.kind}', so the position does not apply to it. Resume with "
                "the data, and the loader, that the run began with."
            )
        if (then := tuple(at["global_batch"])) != (now := self._global_batch()):
            return _other_global_batches(then, now)
        batches = self._batches()
        if at["batches"] != batches and None not in (at["batches"], batches):
            return (
                f"The training data had {at['batches']} batches when the checkpoint was taken, in the middle of an epoch, and "
                f"has {batches} now. Resume with the same data set and batch size."
            )
        return ""

    def changed(self, at: Position) -> list[str]:
        """Return how the data of a position between epochs differs from this data, where the run can continue with it."""
        now = self._global_batch()
        then = tuple(at.get("global_batch", now))
        return ["a global batch was {} {}, is {} {}".format(*then, *now)] if then != now else []

    def reshare(self, positions: Sequence[Position], ranks: int) -> Position:
        """See :meth:`hocket.data.Source.reshare`. Ranks that read the same data have the same position."""
        if "start" in positions[0] and positions[0]["of_rank"]:
            raise DataError(
                f"{len(positions)} ranks, each with data of its own, were in the middle of an epoch, which {ranks} cannot "
                "continue. Start as many ranks, or let the strategy divide the data: remove DistributedSampler and split_data."
            )
        return positions[0]

    def _global_batch(self) -> tuple[int, str]:
        size = loaders.batch_size(self.data)
        return self.slices.global_batch or ((1, "batches") if size is None else (size, "samples"))

    # --- random numbers

    def _random_numbers(self) -> dict[str, Any]:
        return {"global": seeding.to_tree(seeding.capture(devices=False)), "sources": self._generators.capture()}

    def _put(self, start: Mapping[str, Any]) -> None:
        seeding.restore(seeding.from_tree(start["global"]))
        self._generators.restore(start["sources"])

    def _restore_generators(self, at: Position) -> None:
        self._generators.restore(at["sources"], samplers=False)


def _other_global_batches(then: tuple[Any, ...], now: tuple[int, str]) -> str:
    """Return the error message for an epoch with global batches of another size."""
    (number, unit), (given, of) = then, now
    if unit == "samples":
        advice = f"Pass «global_batch={number}» to the Trainer"
    elif number > 1:
        advice = f"Start {number} ranks, without global_batch"
    else:
        advice = "Pass «global_batch=» with the number of samples that a batch of the data has"
    return (
        f"The checkpoint was taken in the middle of an epoch, in which a global batch was made of {number} {unit}; now it is "
        f"made of {given} {of}. {advice}, or resume from the end of an epoch."
    )


class Batches(DataSource):
    """A list or tuple of batches, continued by index."""

    kind = "list"
    priority = 25

    @classmethod
    def serves(cls, data: Any) -> bool:
        """Whether this is a list or tuple."""
        return isinstance(data, list | tuple)
