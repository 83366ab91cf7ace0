"""Batches of any nesting: tensors, sequences and mappings of them, named tuples and dataclasses included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Counts(NamedTuple):
    """What a batch counts for."""

    samples: int
    tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """A (micro)batch that a rank without a share of it computes on to keep the others company; it counts nothing."""

    batch: Any


def unpadded(batch: Any) -> tuple[Any, bool]:
    """What to compute on, and whether it counts."""
    return (batch.batch, False) if isinstance(batch, Padding) else (batch, True)


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The same nesting with ``function`` applied to every tensor; everything else is passed through."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if type(batch) is tuple or type(batch) is list:
        return type(batch)([map_tensors(function, item) for item in batch])
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, item) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: map_tensors(function, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def move(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``; tensors that are there already stay the same. Copies from pinned memory are asynchronous."""
    if type(batch) is tuple or type(batch) is list:  # the usual shape, for every batch
        for item in batch:
            if type(item) is not torch.Tensor or item.device != device:
                break
        else:
            return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def count(batch: Any) -> Counts:
    """Samples: the size of dimension 0 that all tensors of one or more dimensions share. Tokens: the elements of ``input_ids``.

    Raises ValueError if the tensors disagree or there is none; a `hocket.Task` with a ``count`` of its own then says it.
    """
    if type(batch) is tuple or type(batch) is list:  # the usual shape, for every batch
        samples = -1
        for item in batch:
            if type(item) is not torch.Tensor or not item.dim() or samples not in (-1, item.size(0)):
                break
            samples = item.size(0)
        else:
            if batch:
                return tuple.__new__(Counts, (samples, 0))  # Counts(samples) without a function call in every batch
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        found = "none" if not sizes else f"sizes {sorted(sizes)}"
        raise ValueError(
            f"Cannot tell how many samples a batch of {type(batch).__name__} holds: its tensors and lists should agree on "
            f"the size of dimension 0, found {found}. Use a hocket.Task and define count(batch)."
        )
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return Counts(sizes.pop(), tokens.numel() if isinstance(tokens, torch.Tensor) else 0)


def split(batch: Any, size: int) -> list[Any]:
    """Cut a batch along dimension 0 into microbatches of ``size`` samples, the last one perhaps smaller.

    Tensors become views; lists of per-sample items are sliced; numbers, strings and 0-dimensional tensors are repeated.
    """
    if size < 1:
        raise ValueError(f"A microbatch holds at least one sample, not {size}.")
    samples = count(batch).samples
    if samples <= size:
        return [batch]
    if (type(batch) is tuple or type(batch) is list) and all(
        type(item) is torch.Tensor and item.dim() for item in batch
    ):
        return [type(batch)(piece) for piece in zip(*(item.split(size) for item in batch), strict=True)]
    return [slice_samples(batch, start, min(start + size, samples), samples) for start in range(0, samples, size)]


def slice_samples(batch: Any, start: int, stop: int, samples: int | None = None) -> Any:
    """Samples ``start`` to ``stop`` of a batch of ``samples``."""
    total = count(batch).samples if samples is None else samples

    def cut(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item[start:stop] if item.dim() and item.shape[0] == total else item
        if isinstance(item, Mapping):
            return _like_mapping(item, {key: cut(value) for key, value in item.items()})
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*(cut(part) for part in item))
        if isinstance(item, list | tuple):
            if _is_per_sample(item) and len(item) == total:
                return item[start:stop]
            return type(item)(cut(part) for part in item)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.replace(
                item, **{f.name: cut(getattr(item, f.name)) for f in dataclasses.fields(item) if f.init}
            )
        return item

    return cut(batch)


def get_item(batch: Any, key: Any) -> Any:
    """``batch[key]``, for a mapping or a sequence, or the attribute ``key``, for anything else."""
    if isinstance(batch, Mapping | list | tuple):
        return batch[key]
    return getattr(batch, key)


def set_item(batch: Any, key: Any, value: Any) -> Any:
    """A batch like ``batch`` with ``value`` at ``key``; the batch given is not changed.

    Raises KeyError, IndexError or AttributeError if there is nothing at ``key`` to replace.
    """
    get_item(batch, key)
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {**batch, key: value})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch._replace(**{batch._fields[key]: value})  # type: ignore[attr-defined]
    if isinstance(batch, list | tuple):
        index = range(len(batch))[key]
        return type(batch)(value if i == index else item for i, item in enumerate(batch))
    return dataclasses.replace(batch, **{key: value})


def _like_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """``items`` as the kind of mapping that ``batch`` is, where that kind can be made from a dict (BatchEncoding can)."""
    return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]


def _is_per_sample(item: Sequence[Any]) -> bool:
    """Whether a list stands for samples (names, boxes) rather than for the fields of a batch."""
    return bool(item) and not any(isinstance(part, torch.Tensor | Mapping | list | tuple) for part in item)


def _sizes(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield batch.shape[0]
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value)
    elif isinstance(batch, list | tuple):
        if _is_per_sample(batch):
            yield len(batch)
        else:
            for item in batch:
                yield from _sizes(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _sizes(getattr(batch, field.name))
