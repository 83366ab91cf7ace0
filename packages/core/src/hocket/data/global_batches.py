"""Global batches: what all ranks train on together in one step, and how many samples that is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hocket.data.batches import count
from hocket.data.errors import DataError
from hocket.data.prepared import Prepared


def by_index(data: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader over a map-style data set, whose samples can be chosen before they are loaded."""
    return isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)


def batch_size(data: Any) -> int | None:
    """The samples of a batch where that can be set: a DataLoader's ``batch_size``, or that of torch's BatchSampler."""
    sampler: Any = data.batch_sampler if by_index(data) else None
    if sampler is None or (data.batch_size is None and type(sampler) is not BatchSampler):
        return None
    return int(sampler.batch_size)


def makeup(data: Any) -> tuple[int, str]:
    """What makes a global batch, as a number and its unit; see `Prepared`."""
    if isinstance(data, Prepared):
        return data.makeup
    size = batch_size(data)
    return (1, "batches") if size is None else (size, "samples")


def with_sampler(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of a loader with another ``batch_sampler``, or ``sampler``; a new one would lose what subclasses add."""
    changed = copy.copy(loader)
    # Past DataLoader.__setattr__, which forbids this.
    vars(changed).update(changes, _iterator=None)
    return changed


def sized(data: Iterable[Any], size: int, ranks: int = 1) -> Any:
    """``data`` in global batches of ``size`` samples, the last one perhaps smaller, unless it drops that.

    Where the batch size can be set, it is (see `batch_size`): samples, their order and ``drop_last`` stay. Other batches are
    taken as they are, and checked: DataError, while they are read, for one that is larger than ``size``, and for one that
    is smaller where another follows.

    Raises:
        ValueError: ``size`` is not a number of samples, or there are more ``ranks`` than that.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < ranks:
        raise ValueError(
            f"global_batch={size!r} is not enough for {ranks} rank{'s' if ranks > 1 else ''}: it is how many samples all ranks "
            f"train on together in one step. Give an int of {ranks} or more."
        )
    if by_index(data) and data.batch_sampler is not None:
        sampler: Any = _Checked(data.batch_sampler, size, len)
        if batch_size(data) is not None:
            sampler = copy.copy(data.batch_sampler)
            sampler.batch_size = size
        return with_sampler(data, batch_sampler=sampler)
    return _Checked(data, size, lambda batch: count(batch).samples)


class _Checked(Prepared):
    """Batches, of samples or of indices, that have ``size`` of them; only the last may have fewer."""

    def __init__(self, data: Iterable[Any], size: int, samples: Callable[[Any], int]) -> None:
        super().__init__(data)
        self._size, self._samples = size, samples

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        before = self._size
        for batch in batches:
            found = self._samples(batch)
            if before < self._size or found > self._size:
                wrong = f"{found} samples" if before == self._size else f"{before} samples that is not the last"
                raise DataError(
                    f"global_batch={self._size}, but the training data has a batch of {wrong}. The batch size of a "
                    f"{type(self._data).__name__} cannot be set from outside: have it make batches of {self._size}, or leave "
                    "out global_batch; then its batches are each rank's own."
                )
            before = found
            yield batch
