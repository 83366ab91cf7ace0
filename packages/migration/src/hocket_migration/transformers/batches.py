"""The batches of a loader of transformers, epoch by epoch, from the middle of an epoch if a run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any


class Batches:
    """A loader, iterated once in each epoch as transformers does, so that its order and random numbers are the same.

    Args:
        loader: what ``get_train_dataloader()`` returned.
        epoch: the epoch to begin with.
        skip: the number of its batches that were trained on before.
        begun: called once, when the skipped batches were read.
    """

    def __init__(self, loader: Any, epoch: int = 0, skip: int = 0, begun: Callable[[], None] = lambda: None) -> None:
        self.loader = loader
        self._first = self._epoch = epoch
        self._skip, self._begun = skip, begun

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from the first."""
        self._epoch = self._first + epoch

    def __iter__(self) -> Iterator[Any]:
        loader, skip = self.loader, self._skip
        inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for owner in (loader, inner):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self._epoch)
        self._skip = 0
        batches = iter(loader)
        for _ in islice(batches, skip):
            pass
        begun, self._begun = self._begun, lambda: None
        begun()
        return batches

    def __len__(self) -> int:
        """Return the number of batches in the next epoch. Raises TypeError if the loader does not say."""
        return len(self.loader) - self._skip


class OfRank:
    """A loader as one of several ranks sees it, for the number of its batches; everything else is that of the loader."""

    def __init__(self, loader: Any, ranks: int) -> None:
        self._loader, self._ranks = loader, ranks

    def __len__(self) -> int:
        """Return the number of batches of a rank. Raises TypeError if the loader does not say."""
        return -(-len(self._loader) // self._ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
