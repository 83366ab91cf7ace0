"""Orders of samples that are known at any position: the hook by which a sampler is resumed at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self


class Order:
    """The base of batch samplers that can begin at any batch of an epoch without drawing the batches before it.

    Pass one to a DataLoader as ``batch_sampler=``. A resumed run calls `after`. A run with ``global_batch=``, or with several
    ranks, sets `batch_size` of a shallow copy to the size of a global batch, and each rank loads its contiguous part of each
    list. ``set_epoch`` is called at the beginning of each epoch, if there is one. Batches may depend on the seed of the run by
    ``torch.initial_seed()``, which is that of rank 0 on all ranks, and on nothing that is drawn.

    Example:
        >>> import torch
        >>> import hocket.data
        >>> class Backwards(hocket.data.Order):
        ...     batch_size, samples = 2, 4
        ...     def __len__(self): return 4 // self.batch_size
        ...     def after(self, skip):
        ...         done = min(skip, len(self))
        ...         lists = ([3 - i * self.batch_size - k for k in range(self.batch_size)] for i in range(done, len(self)))
        ...         return lists, done
        >>> list(torch.utils.data.DataLoader(range(4), batch_sampler=Backwards()))
        [tensor([3, 2]), tensor([1, 0])]
        >>> next(Backwards().after(1)[0])
        [1, 0]
    """

    #: Samples in a list, of which the last may have fewer; and in all lists of an epoch.
    batch_size: int
    samples: int
    #: All that the order depends on besides the seed and the epoch. A position is refused where it differs.
    fingerprint: str | None = None

    def after(self, skip: int) -> tuple[Iterator[Any], int]:
        """Return an iterator over the lists of indices after the first ``skip``, and how many of them there were."""
        raise NotImplementedError

    def of_rank(self, rank: int, ranks: int) -> Self:
        """Return the same order, told which part of each list this process loads, so that it can fetch ahead."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)[0]

    def __len__(self) -> int:
        raise NotImplementedError
