"""Any other iterable: past batches are read again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hocket.data import loaders
from hocket.data.rank_slices import Slices
from hocket.data.source import Position
from hocket.data.sources.base import DataSource
from hocket.help import warn


class Replay(DataSource):
    """An iterable without a position. A resumed run reads the past batches of the epoch again, and discards them."""

    kind = "replay"
    priority = 0

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        super().__init__(data, slices, given)
        self._warned = False

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether this can be iterated, and its samples cannot be chosen by index."""
        iterable = isinstance(data, Iterable) or hasattr(type(data), "__getitem__")
        return iterable and not loaders.by_index(data)

    def position(self, batches: int | None = None) -> Position:
        """See :meth:`hocket.data.Source.position`."""
        if batches is not None and not self._warned:
            self._warned = True
            warn(
                f"{type(self.data).__name__} has no position to save, so a resumed run reads the past batches of the current "
                "epoch again, and discards them. Use a map-style data set, or data with state_dict and load_state_dict, such "
                "as torchdata's StatefulDataLoader."
            )
        return super().position(batches)
