"""Plain loaders without workers over iterable data sets that have a state."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from hocket.basics.plain_data import decode
from hocket.data import loaders
from hocket.data.rank_slices import Slices
from hocket.data.source import Position
from hocket.data.sources.stateful import Stateful
from hocket.data.sources.torchdata import is_loader_state
from hocket.data.stateful import has_state


class StatefulDataset(Stateful):
    """A DataLoader without workers over an iterable data set with a state: that state is the position."""

    priority = 20

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        super().__init__(data, slices, given)
        self.within = self.between = data.dataset

    @classmethod
    def serves(cls, data: Any) -> bool:
        """Whether a DataLoader of torch iterates such a data set in this process."""
        iterable = isinstance(data, DataLoader) and not loaders.by_index(data)
        return iterable and not data.num_workers and has_state(data.dataset)

    def compatible(self, at: Position) -> str:
        """See :meth:`hocket.data.Source.compatible`: the state is not that of a StatefulDataLoader."""
        if problem := super().compatible(at):
            return problem
        if not at.get("over") and "own" in at and is_loader_state(decode(at["own"])):
            return (
                "The checkpoint has the state of torchdata's StatefulDataLoader, in the middle of an epoch, which a "
                f"{type(self.data).__name__} cannot load. Resume with a StatefulDataLoader, or from the end of an epoch."
            )
        return ""
