"""Stateful data: loaders and streams with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType

from hocket.basics.plain_data import decode, encode
from hocket.data import loaders
from hocket.data.rank_slices import Slices
from hocket.data.source import Position
from hocket.data.sources.base import DataSource
from hocket.help import optional_packages


class Stateful(DataSource):
    """Data with ``state_dict`` and ``load_state_dict``: its state is the position, within and between epochs."""

    kind = "state"
    priority = 30

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        super().__init__(data, slices, given)
        #: The object whose state is a position within an epoch, and the one whose state persists across epochs, or None.
        self.within: Any = data
        self.between: Any = data
        self._fetcher: ReferenceType[Any] | None = None
        #: Whether the data had ended before the checkpoint from which this epoch continues.
        self._over = False

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether the data has its own state, and its samples cannot be chosen by index."""
        return loaders.has_own_state(data) and not loaders.by_index(data)

    def iterate(self) -> Iterator[Any]:
        """See :meth:`DataSource.iterate`."""
        batches = super().iterate()
        self._fetcher, self._over = loaders.fetcher_of(batches), False
        return batches

    def has_ended(self) -> bool:
        """Whether the last batch was the end of the data. If its state were loaded then, it might yield another epoch."""
        return loaders.has_ended(self._fetcher)

    def loadable(self, state: object) -> bool:
        """Whether the data continues correctly from this state of it; otherwise past batches are read again."""
        return True

    def position(self, batches: int | None = None) -> Position:
        """See :meth:`hocket.data.Source.position`."""
        position = super().position(batches)
        over = batches is not None and (self._over or self.has_ended())
        if batches is not None and not over:
            optional_packages.ask("data_states.warn_of", self.data)
        owner = self.between if batches is None or over else self.within
        if owner is not None:
            position["own"] = encode(owner.state_dict(), "the data's state")
        if batches is not None:
            position["over"] = over
        return position

    def restore(self, at: Position) -> None:
        """See :meth:`hocket.data.Source.restore`."""
        super().restore(at)
        if self.between is not None and at["kind"] == self.kind and "own" in at:
            self.between.load_state_dict(decode(at["own"]))

    def _continue(self, read: int, at: Position) -> Iterator[Any]:
        state = decode(at["own"]) if "own" in at else None
        if at.get("over", False):
            if self.between is not None and state is not None:
                self.between.load_state_dict(state)
            self._over, self._start = True, at["start"]
            return self.slices.slice(iter(()))  # without starting workers
        if state is None or not self.loadable(state):
            return self._begin(read, at)
        self.within.load_state_dict(state)
        return self._begin(0, at)
