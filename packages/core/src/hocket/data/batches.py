"""Batches of any nesting: count their samples, split them into microbatches and slices, and join them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hocket.data.containers import container_of
from hocket.data.nesting import fields_of, like_mapping, with_fields
from hocket.data.reading import How, how_divided, is_numbers, is_per_sample, may_hold_samples, read
from hocket.errors import WrongValue

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class Window:
    """The batch of ``Trainer(accumulate="4ba")``: four batches of the loader, in order; fewer at the end of an epoch.

    Each of them is computed on separately, as at least one microbatch.

    Example:
        >>> from hocket.data import Window
        >>> Window([[1, 2], [3]]).batches
        ([1, 2], [3])
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = tuple(batches)


class Counts(NamedTuple):
    """Number of samples and tokens in a batch.

    Example:
        >>> from hocket.data import Counts
        >>> Counts(samples=8, tokens=512).tokens
        512
    """

    samples: int
    tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """A padding (micro)batch, which counts 0 samples. Ranks without a slice compute on it, because all ranks must compute.

    Example:
        >>> import torch
        >>> from hocket.data import Padding
        >>> Padding(torch.zeros(2, 3)).batch.shape
        torch.Size([2, 3])
    """

    batch: Batch


def unpadded(batch: Batch) -> tuple[Any, bool]:
    """Return the batch to compute on, and whether it counts."""
    return (batch.batch, False) if isinstance(batch, Padding) else (batch, True)


def count(batch: Batch) -> Counts:
    """Count samples, the common size of dimension 0 of all tensors, and tokens, the elements of ``input_ids``.

    Where these sizes differ, lists in the batch, or the batch itself, are lists of samples if their lengths agree: images and
    targets of different sizes, or ragged sequences. In a dict of batches, such as those of `hocket.data.Several`, tokens are
    the sum over the batches. 0-dimensional tensors are ignored. For other containers see `hocket.data.register_batch`.

    Raises ValueError if the number is not certain: define ``count`` in a `hocket.Task` then.

    Example:
        >>> import torch
        >>> from hocket.data import count
        >>> count({"input_ids": torch.zeros(4, 16, dtype=torch.long)})
        Counts(samples=4, tokens=64)
        >>> count(([torch.zeros(3, 8, 9), torch.zeros(3, 5, 7)], [{"boxes": torch.zeros(6, 4)}, {"boxes": torch.zeros(1, 4)}]))
        Counts(samples=2, tokens=0)
    """
    if type(batch) is tuple or type(batch) is list or type(batch) is dict:  # as fast a path as in `move`
        samples = -1
        for item in batch.values() if type(batch) is dict else batch:
            if type(item) is not torch.Tensor or not item.dim() or samples not in (-1, item.size(0)):
                break
            samples = item.size(0)
        else:
            if batch:
                return Counts(samples, _tokens(batch))
    return Counts(read(batch).samples, _tokens(batch))


def split(batch: Batch, size: int, samples: int | None = None) -> list[Any]:
    """Split a batch along dimension 0 into microbatches of ``size`` samples, the last one perhaps smaller.

    Tensors become views, and lists of per-sample items are sliced, but never the tensors in them. Numbers, strings, None and
    0-dimensional tensors are repeated.

    Args:
        samples: number of samples in the batch; None for what :func:`count` returns.

    Raises:
        ValueError: it is not certain how to divide some part of the batch into samples.

    Example:
        >>> import torch
        >>> from hocket.data import split
        >>> [len(inputs) for inputs, targets in split((torch.zeros(5, 3), torch.arange(5)), 2)]
        [2, 2, 1]
    """
    if size < 1:
        raise WrongValue(f"A microbatch holds at least one sample, not {size}.")
    counted = samples is None
    samples = count(batch).samples if samples is None else samples
    if samples <= size:
        return [batch]
    if (
        (type(batch) is tuple or type(batch) is list)
        and (counted or len(batch) == 2 or len(batch) != samples)
        and all(
            type(item) is torch.Tensor
            and item.dim()
            and item.size(0) == samples
            and item.layout is torch.strided
            and not item.is_nested
            for item in batch
        )
    ):
        return [type(batch)(fields) for fields in zip(*(item.split(size) for item in batch), strict=True)]
    take = _Slicer(batch, samples, counted)
    return [take(slice(start, start + size)) for start in range(0, samples, size)]


def slice_samples(batch: Batch, start: int, stop: int, samples: int | None = None) -> Any:
    """Return samples ``start`` to ``stop`` of a batch of ``samples``; see :func:`split`."""
    return _Slicer(batch, count(batch).samples if samples is None else samples, samples is None)(slice(start, stop))


def take_samples(batch: Batch, indices: list[int] | torch.Tensor, samples: int) -> Any:
    """Return copies of the samples with these indices of a batch of ``samples``.

    Indices in a tensor on the device of the batch are not read on the host, unless the batch has parts that are no tensors.
    """
    return _Slicer(batch, samples, False)(indices)


def join(parts: Sequence[Any]) -> Any:
    """Undo :func:`split`: tensors are concatenated along dimension 0, lists of samples chained.

    Numbers, strings, None and 0-dimensional tensors are taken from the first part. Raises ValueError for parts of different
    nesting.

    Example:
        >>> import torch
        >>> from hocket.data import join, split
        >>> torch.equal(join(split(torch.arange(5), 2)), torch.arange(5))
        True
    """
    if len(parts) == 1:
        return parts[0]
    ways = {how for part in parts if (how := how_divided(part)) is not None}
    return _join(parts, next((how for how in (How.SAMPLES, How.LISTS) if how in ways), How.FIELDS), top=True)


def _join(parts: Sequence[Any], how: How, top: bool = False) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise WrongValue(f"Cannot join parts of different types: {', '.join(type(part).__name__ for part in parts)}.")
    if (container := container_of(first)) is not None:
        return container.join(parts)
    if isinstance(first, torch.Tensor) or (isinstance(first, Mapping) and hasattr(first, "shape")):
        return torch.cat(list(parts)) if len(first.shape) else first
    if type(first).__module__ == "numpy" and first.shape:
        import numpy as np

        return np.concatenate(parts)
    if isinstance(first, Mapping):
        return like_mapping(first, {key: _join([part[key] for part in parts], how) for key in first})
    if (fields := fields_of(first)) is not None:
        return with_fields(first, {name: _join([getattr(part, name) for part in parts], how) for name in fields})
    if isinstance(first, list | tuple):
        of_samples = top if how is How.SAMPLES else how is How.LISTS and not top and all(map(may_hold_samples, parts))
        if of_samples or is_per_sample(first):
            return type(first)(item for part in parts for item in part)
        if len({len(part) for part in parts}) > 1:
            raise WrongValue("Cannot join sequences of different lengths. Define join(parts) in the hocket.Task.")
        return type(first)(_join(column, how) for column in zip(*parts, strict=True))
    return first


class _Slicer:
    """Take samples out of a batch, after checking every part of it; ``counted``: interpret sequences as :func:`count` does."""

    def __init__(self, batch: Batch, samples: int, counted: bool) -> None:
        self._batch, self._samples = batch, samples
        self._counted = counted
        #: What the sequences hold, if the batch itself tells.
        self._how: How | None = None
        with contextlib.suppress(ValueError):
            reading = read(batch)
            self._how = reading.how if reading.samples == samples else None
        #: Whether some sequence can only be one of samples, and the problems of sequences that may be either.
        self._of_samples = self._how is How.LISTS
        self._doubts: list[_NotPerSample] = []
        try:
            self._found = self._look(batch, "batch", top=True)
            if self._doubts and not self._of_samples:
                raise self._doubts[0]
        except _NotPerSample as problem:
            raise WrongValue(str(problem)) from None
        if not self._found:
            raise WrongValue(_UNSPLITTABLE.format(f"a batch of {type(batch).__name__}, which counts {samples} samples"))
        self._sliced = {id(item) for item in self._found}

    def __call__(self, index: slice | list[int] | torch.Tensor) -> Any:
        return self._take(self._batch, index)

    def _look(self, item: Any, where: str, top: bool = False) -> list[Any]:
        """Return the parts of ``item`` that have one entry for each sample.

        Raises _NotPerSample for a part that does not.
        """
        if (container := container_of(item)) is not None:
            if container.count(item) != self._samples:
                raise self._problem(item, where, f"of {container.count(item)} samples")
            return [item]
        if isinstance(item, torch.Tensor) or (hasattr(item, "shape") and hasattr(item, "__getitem__")):
            layout = getattr(item, "layout", torch.strided)
            if layout is not torch.strided or getattr(item, "is_nested", False):
                kind = "nested" if item.is_nested else "sparse"
                raise self._problem(item, where, f"that is {kind} and not dense or jagged")
            if not item.shape:
                return []
            if item.shape[0] != self._samples:
                raise self._problem(item, where, f"of shape {tuple(item.shape)}")
            return [item]
        if isinstance(item, Mapping):
            return [part for key, value in item.items() for part in self._look(value, f"{where}[{key!r}]")]
        if (fields := fields_of(item)) is not None:
            return [part for name, value in fields.items() for part in self._look(value, f"{where}.{name}")]
        if isinstance(item, list | tuple):
            return self._look_at_sequence(item, where, top)
        if item is None or isinstance(item, _REPEATED):
            return []
        raise self._problem(item, where)

    def _look_at_sequence(self, item: Sequence[Any], where: str, top: bool) -> list[Any]:
        """Look at a sequence of samples, or of fields that each hold all samples."""
        of_samples = len(item) == self._samples and may_hold_samples(item)
        if of_samples and (self._how is How.SAMPLES if top else self._how is How.LISTS):
            return [item]
        if is_per_sample(item):
            if len(item) != self._samples and any(part is not None for part in item):
                raise self._problem(item, where, f"of {len(item)} items")
            return [item] if len(item) == self._samples else []
        try:
            fields = [part for i, field in enumerate(item) for part in self._look(field, f"{where}[{i}]")]
        except _NotPerSample:
            if not of_samples:
                raise
            self._of_samples = True
            return [item]
        if not of_samples:
            return fields
        if not fields or all(isinstance(part, list | tuple) and is_numbers(part) for part in item):
            return [item]
        if top and len(item) == 2 and isinstance(item[0], torch.Tensor):
            return fields  # such as (inputs, targets) of two samples
        if self._how is How.LISTS or (self._how is How.FIELDS and (self._counted or not top)):
            return fields
        # Three images of three channels, or three views of three images each? Treat it like the batch's other sequences.
        self._doubts.append(self._problem(item, where, f"of {len(item)} items that have {len(item)} each"))
        return [item]

    def _problem(self, item: Any, where: str, what: str = "") -> _NotPerSample:
        kind = f"{type(item).__name__} {what}".strip()
        return _NotPerSample(_UNSPLITTABLE.format(f"{where}, a {kind}, in a batch that counts {self._samples} samples"))

    def _take(self, item: Any, index: slice | list[int] | torch.Tensor) -> Any:
        if id(item) in self._sliced:
            if isinstance(index, torch.Tensor) and not (
                isinstance(item, torch.Tensor) and item.layout is torch.strided and item.device == index.device
            ):
                index = index.tolist()
            if (container := container_of(item)) is not None:
                rows = list(range(*index.indices(self._samples))) if isinstance(index, slice) else list(index)
                return container.take(item, rows)
            if isinstance(index, list) and isinstance(item, list | tuple):
                return type(item)(item[row] for row in index)
            return item[index]
        if isinstance(item, Mapping):
            return like_mapping(item, {key: self._take(value, index) for key, value in item.items()})
        if (fields := fields_of(item)) is not None:
            return with_fields(item, {name: self._take(value, index) for name, value in fields.items()})
        if isinstance(item, list | tuple):
            return type(item)(self._take(part, index) for part in item)
        return item


class _NotPerSample(Exception):
    """Some part of a batch does not have one entry for each sample."""


#: Types that may be in a batch without belonging to its samples.
_REPEATED = (str, bytes, int, float, complex, Enum, torch.dtype, torch.device, torch.Tensor)

_UNSPLITTABLE = (
    "Cannot split {} into smaller ones: it is not certain which part belongs to which sample. In a hocket.Task define "
    "split(batch, size), which returns a list of batches of at most size samples each."
)


def _tokens(batch: Batch) -> int:
    """Return the number of elements of ``input_ids``: the batch's, or those of the batches by name in it."""
    if not isinstance(batch, Mapping):
        return 0
    tokens = batch.get("input_ids")
    return tokens.numel() if isinstance(tokens, torch.Tensor) else sum(map(_tokens, batch.values()))
