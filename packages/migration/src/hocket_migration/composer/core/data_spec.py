"""Data with functions of its batches, and evaluation sets, as Composer's Trainer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hocket.data import batches


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
        self.num_samples, self.num_tokens = num_samples, num_tokens
        self.batch_transforms, self.microbatch_transforms = batch_transforms, microbatch_transforms
        self.split_batch = split_batch
        self.get_num_samples_in_batch = get_num_samples_in_batch
        self.get_num_tokens_in_batch = get_num_tokens_in_batch

    def count(self, batch: Any) -> batches.Counts:
        """Return the samples and tokens of a batch."""
        samples, tokens = self.get_num_samples_in_batch, self.get_num_tokens_in_batch
        counted = batches.count(batch) if samples is None else batches.Counts(int(samples(batch)))
        if tokens is None:
            return counted
        found = tokens(batch)
        return batches.Counts(counted.samples, int(found["total"] if isinstance(found, Mapping) else found))

    def split(self, batch: Any, size: int) -> Sequence[Any]:
        """Return microbatches of at most ``size`` samples."""
        if self.split_batch is not None:
            return self.split_batch(batch, size)
        return batches.split(batch, size, self.count(batch).samples)


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
        self._spec, self._limit, self._size = spec, limit, size

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._spec.dataloader):
            if number == self._limit:
                return
            yield from [batch] if self._size is None else self._spec.split(batch, self._size)
