"""DataLoaders over map-style data sets: a resume draws indices again and loads no past samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hocket.basics.plain_data import decode, encode
from hocket.data import loaders
from hocket.data.errors import DataError
from hocket.data.rank_slices import Slices
from hocket.data.samplers import Indices
from hocket.data.source import Position, known_length
from hocket.data.sources.base import DataSource
from hocket.data.stateful import has_state
from hocket.data.workers import sheltered
from hocket.help import warn


class ByIndex(DataSource):
    """A DataLoader over a map-style data set, torchdata's included.

    The indices of an epoch are drawn again from the RNG state in which it began, and those of past batches are skipped.
    Without workers the state of a data set that has one is restored. A state of the loader itself is not used: it does
    not account for samples divided over ranks, and fits only one number of workers.
    """

    kind = "indices"
    priority = 40

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        super().__init__(data, slices, given)
        dataset = getattr(self.given, "dataset", data.dataset)  # not a view by which algorithms replace it
        self._stateful = dataset if not data.num_workers and has_state(dataset) else None
        self._drawn = _drawn(self.given)
        self._indices: Indices | None = None
        self._warned = False

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether samples can be chosen by index before they are loaded."""
        return loaders.by_index(data)

    def _open(self, read: int, at: Position | None, begin_with: dict[str, Any] | None) -> Iterator[Any]:
        skip, repeat = self.slices.to_skip(read)
        name = loaders.sampler_name(self.data)
        first = begin_with if at is None else at["first"]
        ahead = self.data.num_workers * (self.data.prefetch_factor or 0)
        indices = self._indices = Indices(getattr(self.data, name), self._generators, first, skip, ahead)
        with loaders.standing_in(self.data, name, indices), sheltered(self.data):
            batches = self.slices.slice(self.iterate(), repeat)
        return self._complete(batches, indices, read)

    def _continue(self, read: int, at: Position) -> Iterator[Any]:
        if self._stateful is not None and "own" in at:
            self._stateful.load_state_dict(decode(at["own"]))
        batches = self._begin(read, at)
        assert self._indices is not None
        if at["first"] is None:
            return batches  # nothing was drawn yet: one of several loaders, whose turn has not come
        self._indices.begin()
        skip, _ = self.slices.to_skip(read)
        if self._indices.asked < skip:
            raise DataError(
                f"{skip} batches of the epoch are done, but the sampler of the training data yields {self._indices.asked} now. "
                "Resume with the same data set, sampler and batch size."
            )
        return batches

    def _complete(self, batches: Iterator[Any], indices: Indices, yielded: int) -> Iterator[Any]:
        """Yield the batches. Raises DataError if they end before the sampler: the data set raised StopIteration."""
        for batch in batches:
            yielded += 1
            yield batch
        if indices.asked > yielded:  # padding batches were yielded too
            raise DataError(
                f"The data ended after {yielded} batches, though its sampler has more: {self.length() or 'more'} in all. "
                f"{type(self.data.dataset).__name__} raised StopIteration while it loaded a sample of the next one, as next() "
                "does for an exhausted iterator, and the DataLoader took that for the end. Catch it in __getitem__."
            )

    def position(self, batches: int | None = None) -> Position:
        """See :meth:`hocket.data.Source.position`."""
        self._warn_of_workers()
        position = super().position(batches)
        position["drawn"] = self._drawn
        if self._stateful is not None:
            position["own"] = encode(self._stateful.state_dict(), "the data's state")
        if batches is not None and self._indices is not None:
            indices = self._indices
            position |= {"first": indices.first, "asked": indices.asked, "ended": indices.ended}
        return position

    def indices(self, number: int) -> list[Any] | None:
        """Return the data set's indices of the samples in a batch just yielded, by its number in the epoch; None if unknown."""
        if self._indices is None or type(self.slices) is not Slices:  # other slices may yield a batch again
            return None
        drawn = self._indices.recent(number)
        return (
            drawn if drawn is None or isinstance(drawn, list) else list(drawn) if isinstance(drawn, tuple) else [drawn]
        )

    def restore(self, at: Position) -> None:
        """See :meth:`hocket.data.Source.restore`."""
        super().restore(at)
        if self._stateful is not None and at["kind"] == self.kind and "own" in at:
            self._stateful.load_state_dict(decode(at["own"]))

    def compatible(self, at: Position) -> str:
        """See :meth:`hocket.data.Source.compatible`: the same samples, drawn by a sampler of the same kind."""
        if problem := super().compatible(at):
            return problem
        for what, then in at.get("drawn", {}).items():
            now = self._drawn.get(what, then)
            if then != now and None not in (then, now):
                return (
                    f"The {what} of the training data was {then} when the checkpoint was taken, in the middle of an epoch, and "
                    f"is {now} now, so the remaining samples are not known. Resume with what the run began with, or from the "
                    "end of an epoch."
                )
        return ""

    def _restore_generators(self, at: Position) -> None:
        assert self._indices is not None
        if (self._indices.asked, self._indices.ended) == (at["asked"], at["ended"]):
            super()._restore_generators(at)
        else:  # the number of workers changed, and so how far the sampler runs ahead
            self._generators.restore_data_set(at["sources"])

    def _warn_of_workers(self) -> None:
        loader = self.data
        if self._warned or not loader.num_workers or not has_state(loader.dataset):
            return
        self._warned = True
        warn(
            f"{type(loader.dataset).__name__} has a state_dict, but it cannot be read from the {loader.num_workers} worker "
            "processes that load its samples, so a resumed run begins with the initial state of the data set. Use "
            "«num_workers=0», or let samples depend only on their index and on the epoch, which set_epoch receives."
        )


def _drawn(given: object) -> dict[str, int | str | None]:
    """Return the properties of the user's loader that must not change for indices to be drawn again; None if unknown."""
    samplers: list[Any] = [getattr(given, name, None) for name in ("batch_sampler", "sampler")]
    names = [type(sampler).__qualname__ for sampler in samplers if sampler is not None]
    length = known_length(getattr(given, "dataset", ())) or None
    order = getattr(samplers[0], "fingerprint", None)
    return {"length": length, "sampler": " of ".join(names) or None, "order": order}
