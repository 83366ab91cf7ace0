"""Data with functions of its batches, and evaluation sets, as Composer's Trainer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hocket.data import batches
from hocket.data.source import known_length
from hocket.errors import WrongValue


class DataSpec:
    """Data together with functions that transform, count and split its batches.

    Args:
        dataloader: any iterable of batches.
        num_samples, num_tokens: of an epoch; not needed, since hocket counts.
        batch_transforms: a function of each batch, on the CPU.
        microbatch_transforms: a function of each microbatch, on the device.
        split_batch: ``(batch, samples)`` to microbatches of at most so many samples.
        get_num_samples_in_batch: the number of samples of a batch.
        get_num_tokens_in_batch: the number of its tokens; of a dict, its ``"total"``.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import DataSpec
        >>> spec = DataSpec([torch.ones(4, 2)], batch_transforms=lambda batch: batch * 2)
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int | Mapping[str, int]] | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.num_samples = known_length(getattr(dataloader, "dataset", None)) if num_samples is None else num_samples
        self.num_tokens = num_tokens
        self.batch_transforms, self.microbatch_transforms = batch_transforms, microbatch_transforms
        #: Functions of a batch; without arguments of these names, hocket's.
        self.split_batch = split_batch or self._split_batch
        self.get_num_samples_in_batch = get_num_samples_in_batch or self._samples
        self._tokens = get_num_tokens_in_batch

    def _samples(self, batch: Any) -> int:
        return batches.count(batch).samples

    def _split_batch(self, batch: Any, size: int) -> Sequence[Any]:
        return batches.split(batch, size, self.count(batch).samples)

    def get_num_tokens_in_batch(self, batch: Any, token_type: str = "total") -> int:
        """Return the number of tokens of a batch, or of those of a type that the function of the batch counts."""
        if self._tokens is None:
            return batches.count(batch).tokens
        found = self._tokens(batch)
        if not isinstance(found, Mapping):
            return int(found)
        if token_type not in found:
            raise WrongValue(f"get_num_tokens_in_batch counts {', '.join(map(repr, found))}, and not {token_type!r}.")
        return int(found[token_type])

    def count(self, batch: Any) -> batches.Counts:
        """Return the samples and tokens of a batch."""
        samples = self.get_num_samples_in_batch
        counted = batches.count(batch) if samples == self._samples else batches.Counts(int(samples(batch)))
        if self._tokens is None:
            return counted
        return batches.Counts(counted.samples, self.get_num_tokens_in_batch(batch))

    def split(self, batch: Any, size: int) -> Sequence[Any]:
        """Return microbatches of at most ``size`` samples."""
        return self.split_batch(batch, size)

    def length(self) -> int | None:
        """Return the number of batches that the data says that it has: Composer ends an epoch after as many.

        None if it is unknown, or certain: that of a DataLoader over items, or of a list.
        """
        data: Any = self.dataloader
        if isinstance(data, list | tuple):
            return None
        if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
            return None
        return known_length(data)

    def limit(self, batches: int | None) -> int | None:
        """Return how many batches of an epoch are used, if at most so many are wanted; None for all of the data."""
        known = [each for each in (batches, self.length()) if each is not None]
        return min(known, default=None)


def ensure_data_spec(dataloader: Any) -> DataSpec:
    """Return a DataSpec of a DataSpec, its arguments as a dict, or an iterable of batches.

    Example:
        >>> from hocket_migration.composer.core import ensure_data_spec
        >>> ensure_data_spec([1, 2]).dataloader
        [1, 2]
    """
    if isinstance(dataloader, DataSpec):
        return dataloader
    return DataSpec(**dataloader) if isinstance(dataloader, dict) else DataSpec(dataloader)


class Parts:
    """Evaluation data, up to a number of its batches, each divided into batches of at most so many samples."""

    def __init__(self, spec: DataSpec, limit: int | None, size: int | None) -> None:
        self._spec, self._limit, self._size = spec, spec.limit(limit), size

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._spec.dataloader):
            if number == self._limit:
                return
            yield from [batch] if self._size is None else self._spec.split(batch, self._size)
