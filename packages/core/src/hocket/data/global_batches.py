"""Global batches: the samples that all ranks together train on in one step, and their number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hocket.data.adapters import adapt
from hocket.data.batches import count
from hocket.data.errors import DataError
from hocket.data.loaders import batch_size, by_index, with_sampler
from hocket.data.rank_slices import Slices
from hocket.data.source import Source
from hocket.errors import WrongValue


def sized(data: Iterable[Any], size: int, ranks: int = 1) -> Source:
    """Return ``data`` in global batches of ``size`` samples; the last one may be smaller, unless ``drop_last`` drops it.

    If the batch size can be set, it is set (see `hocket.data.loaders.batch_size`): samples, their order and ``drop_last``
    stay the same. Other data is used as it is, and its batches are checked as they are read: a batch larger than ``size``,
    or a smaller one that is not the last, raises DataError.

    Raises:
        ValueError: ``size`` is not a number of samples, or is less than ``ranks``.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from hocket.data import sized
        >>> [len(batch) for batch in sized(DataLoader(torch.arange(10), batch_size=2), 4)]
        [4, 4, 2]
    """
    loader, checked = resized(data, size, ranks)
    return adapt(loader, checked, given=data)


def resized(data: object, size: int, ranks: int = 1) -> tuple[Any, Slices]:
    """Return data with the batch size set if it can be, and the slices that check it if it cannot; see `sized`."""
    if isinstance(size, bool) or not isinstance(size, int) or size < ranks:
        raise WrongValue(
            f"«global_batch={size!r}» is not enough for {ranks} rank{'s' if ranks > 1 else ''}: it is the number of samples "
            f"that all ranks together train on in one step. Give an int of {ranks} or more."
        )
    if not by_index(data) or data.batch_sampler is None:
        return data, Checked(size, type(data).__name__)
    sampler: Any = CheckedSampler(data.batch_sampler, size)
    if batch_size(data) is not None:
        sampler = copy.copy(data.batch_sampler)
        sampler.batch_size = size
    return with_sampler(data, batch_sampler=sampler), Slices()


class Checked(Slices):
    """Batches of ``size`` samples; only the last may have fewer."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__()
        self._size, self._name = size, name

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """See :meth:`Slices.slice`."""
        return checked(batches, self._size, lambda batch: count(batch).samples, self._name)


class CheckedSampler:
    """A batch sampler that yields ``size`` indices at a time; only the last list may be shorter."""

    def __init__(self, sampler: Any, size: int) -> None:
        self._sampler, self._size = sampler, size

    def __iter__(self) -> Iterator[Any]:
        return checked(iter(self._sampler), self._size, len, type(self._sampler).__name__)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # __getattr__ runs before __init__ while a copy is made or unpickled
            raise AttributeError(name)
        return getattr(self._sampler, name)


def checked(batches: Iterator[Any], size: int, samples: Callable[[Any], int], name: str) -> Iterator[Any]:
    """Yield batches. Raises DataError if one is larger than ``size``, or smaller and not the last."""
    before = size
    for batch in batches:
        count = samples(batch)
        if before < size or count > size:
            wrong = f"{count} samples" if before == size else f"{before} samples that is not the last"
            raise DataError(
                f"«global_batch={size}», but the training data has a batch of {wrong}. The batch size of a {name} cannot be "
                f"set from outside: have it make batches of {size}, or omit global_batch; then each rank trains on batches of "
                "its own."
            )
        before = count
        yield batch
