"""Random numbers that belong to a sample: the same in whichever process, and after whichever samples, it is loaded."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hocket.training import seeding


def seeded(dataset: Any, seed: int = 0) -> SeededDataset:
    """A view of a map-style data set in which loading a sample draws random numbers of its own.

    Python's, NumPy's and torch's global generators are seeded by ``(seed, epoch, index)`` while a sample is loaded, and go on
    afterwards as if nothing had been drawn. So random augmentation depends neither on the number of workers or ranks, nor on
    where a run was interrupted. **Exact resume with random augmentation in worker processes needs this**: workers that start
    in the middle of an epoch have not drawn what those before them drew. (Without workers samples are loaded with the run's
    own random numbers, which checkpoints hold.) Generators of the data set's own are not seeded.

    The Trainer says which epoch it is. In a loop of your own call ``set_epoch``; worker processes, persistent ones too, see it
    change.

    Raises TypeError for a data set without indices.
    """
    return SeededDataset(dataset, seed)


class SeededDataset(Dataset[Any]):
    """See :func:`seeded`."""

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"seeded() was given {type(dataset).__name__}, which has no indices that random numbers could belong to. Give "
                "a map-style data set, one with __getitem__."
            )
        self.dataset = dataset
        self.seed = seed
        # In shared memory: persistent workers hold copies of this object for the whole run.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The pass over the data for which random numbers are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Another pass over the data begins."""
        self._epoch.fill_(epoch)
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        before = seeding.capture(devices=False)
        digest = hashlib.blake2b(f"{self.seed}/{self.epoch}/{index}".encode(), digest_size=8).digest()
        try:
            seeding.seed_host(int.from_bytes(digest, "big"))
            return self.dataset[index]
        finally:
            seeding.restore(before)

    def __getattr__(self, name: str) -> Any:
        # Samplers and collate functions ask for .targets or .classes. Not for __getitems__, which would bypass us.
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
