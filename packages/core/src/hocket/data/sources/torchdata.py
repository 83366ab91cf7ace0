"""torchdata's StatefulDataLoader over iterable data sets, and, in this file only, the private names of its state.

``tests/test_loaders.py`` checks them against the installed torchdata. If one is renamed, a loader with only some ended workers
is not recognized: it would yield their samples again (torchdata 0.11, meta-pytorch/data#1437).
"""

from __future__ import annotations

import sys
from typing import Any

from hocket.basics.plain_data import decode
from hocket.data import loaders
from hocket.data.rank_slices import Slices
from hocket.data.source import Position
from hocket.data.sources.stateful import Stateful
from hocket.data.stateful import has_state


class TorchdataLoader(Stateful):
    """A StatefulDataLoader. Its state is a position within an epoch; between two epochs, ``state_dict`` would begin one.

    Across epochs the state of its data set persists; with workers, which end with the epoch, nothing does.
    """

    priority = 35

    def __init__(self, data: Any, slices: Slices | None = None, given: Any = None) -> None:
        super().__init__(data, slices, given)
        self.between = data.dataset if not data.num_workers and has_state(data.dataset) else None

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether this is a StatefulDataLoader over an iterable data set. Imports nothing."""
        torchdata = sys.modules.get("torchdata.stateful_dataloader")
        return torchdata is not None and isinstance(data, torchdata.StatefulDataLoader) and not loaders.by_index(data)

    def has_ended(self) -> bool:
        """See :meth:`Stateful.has_ended`."""
        return all(ended_workers(self.data.state_dict())) if self.data.num_workers else super().has_ended()

    def loadable(self, state: object) -> bool:
        """See :meth:`Stateful.loadable`: not if some workers have ended and others not."""
        return len(set(ended_workers(state))) < 2

    def compatible(self, at: Position) -> str:
        """See :meth:`hocket.data.Source.compatible`: the state is that of a StatefulDataLoader."""
        if problem := super().compatible(at):
            return problem
        if not at.get("over") and "own" in at and not is_loader_state(decode(at["own"])):
            return (
                "The checkpoint has the state of a data set, in the middle of an epoch, which a StatefulDataLoader cannot "
                "load. Resume with the loader that the run began with, or from the end of an epoch."
            )
        return ""


def ended_workers(state: object) -> list[bool]:
    """Return whether each worker has ended, from the state of a StatefulDataLoader; empty without workers."""
    snapshot = state.get("_snapshot") if isinstance(state, dict) else None
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, dict) else None
    return [bool((state.get("fetcher_state") or {}).get("fetcher_ended")) for state in (workers or {}).values()]


def is_loader_state(state: object) -> bool:
    """Whether this is the state of a StatefulDataLoader in the middle of an epoch."""
    return isinstance(state, dict) and "_iterator_finished" in state
