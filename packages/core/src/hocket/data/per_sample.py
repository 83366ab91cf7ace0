"""Random numbers per sample, which do not depend on the process that loads it or on the samples loaded before."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hocket.basics import seeding
from hocket.errors import WrongType


def seeded(dataset: object, seed: int = 0) -> SeededDataset:
    """Return a view of a map-style data set in which every sample has its own random numbers.

    Python's, NumPy's and torch's global generators are seeded by ``(seed, epoch, index)`` while a sample is loaded, and
    restored afterwards. So random augmentation depends neither on the number of workers or ranks, nor on
    where a run was interrupted. **Exact resume with random augmentation in worker processes needs this**: workers that start
    in the middle of an epoch have not drawn the random numbers of its beginning. (Without workers, samples are loaded with the
    run's own random numbers, which checkpoints hold.) Generators of the data set itself are not seeded.

    The Trainer sets the epoch. In a custom loop call ``set_epoch``; it reaches worker processes, persistent ones too.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from hocket.data import seeded
        >>> dataset = TensorDataset(torch.randn(8, 3), torch.arange(8))
        >>> loader = DataLoader(seeded(dataset, seed=1), 4, shuffle=True, num_workers=2)

    Raises TypeError for a data set without indices.
    """
    return SeededDataset(dataset, seed)


class SeededDataset(Dataset[Any]):
    """See :func:`seeded`.

    Example:
        >>> import torch
        >>> from hocket.data import SeededDataset
        >>> class Noisy(torch.utils.data.Dataset):
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return index + torch.rand(())
        >>> dataset = SeededDataset(Noisy(), seed=1)
        >>> bool(dataset[3] == dataset[3])
        True
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise WrongType(
                f"seeded() was given {type(dataset).__name__}, which has no indices to seed samples by. Give a map-style data "
                "set, one with __getitem__."
            )
        self.dataset = dataset
        self.seed = seed
        # In shared memory: persistent workers hold copies of this object for the whole run.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch for which random numbers are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the random numbers of another epoch from now on."""
        self._epoch.fill_(epoch)
        if callable(inner := getattr(self.dataset, "set_epoch", None)):
            inner(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: object) -> Any:
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
