"""Read the structure of a batch: how many samples it has, and which of its sequences are lists of samples.

A sequence in a batch holds either fields that all samples share, such as inputs and targets or several views, or samples, such
as images of different sizes. This module decides which, where a batch itself tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hocket.data.containers import container_of
from hocket.data.nesting import fields_of
from hocket.errors import WrongValue

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class How(Enum):
    """What the sequences of a batch hold."""

    #: Fields: every tensor has one entry for each sample.
    FIELDS = "fields"
    #: The sequences within the batch are lists of samples.
    LISTS = "lists"
    #: The batch itself is a list of samples.
    SAMPLES = "samples"
    #: Either fields or lists, of the same number of samples.
    UNKNOWN = "unknown"


class Reading(NamedTuple):
    """The number of samples in a batch, and what its sequences hold."""

    samples: int
    how: How


def read(batch: Batch) -> Reading:
    """Return how a batch is read. Raises ValueError if that is not certain."""
    if batch is None:
        raise WrongValue(
            "A batch is None. Write a return statement at the end of the loader's collate_fn, or of the data set's __getitem__."
        )
    if _is_list_of_samples(batch):
        return Reading(len(batch), How.SAMPLES)
    sizes, sequences = set(_sizes(batch)), list(_sequences(batch))
    if not sequences:
        if len(sizes) == 1:
            return Reading(sizes.pop(), How.FIELDS)
        raise WrongValue(_problem(batch, f"found {f'sizes {sorted(sizes)}' if sizes else 'none'}"))
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        if len(sizes) == 1:
            return Reading(sizes.pop(), How.FIELDS)
        raise WrongValue(_problem(batch, f"found sizes {sorted(sizes | lengths)}"))
    certain = len(set(map(signature, sequences))) > 1 and not all(isinstance(part[0], Tensor) for part in sequences)
    certain |= any(isinstance(rows[0], Tensor) and len({part.shape[1:] for part in rows}) > 1 for rows in sequences)
    if sizes == lengths:
        return Reading(lengths.pop(), How.LISTS if certain else How.UNKNOWN)
    pairs = isinstance(batch, list | tuple) and len(batch) != 2 and len(set(map(signature, batch))) == 1
    if lengths == {1} and len(sizes) == 1 and not certain:  # such as {name: batch} of a data set of inputs alone
        return Reading(sizes.pop(), How.FIELDS)
    if (len(sizes) == 1 and not certain) or pairs:
        raise WrongValue(_problem(batch, f"its sequences may be lists of samples or fields: {sorted(sizes | lengths)}"))
    return Reading(lengths.pop(), How.LISTS)


def how_divided(batch: Batch) -> How | None:
    """Return what the sequences of a batch hold, if it has any and that is certain; else None."""
    items = batch.values() if type(batch) is dict else batch if type(batch) is tuple or type(batch) is list else ()
    if items and all(type(item) is Tensor for item in items):  # the usual batches have none
        return None
    try:
        return read(batch).how
    except ValueError:
        return None


def samples_of_part(part: Batch, how: How | None) -> int:
    """Return the number of samples in a part of a batch that was divided as `how_divided` says.

    A part alone may be less certain: one sample of a list may have as many entries as another field.
    """
    if how is How.SAMPLES:
        return len(part)
    lengths = set(_lengths(part)) if how is How.LISTS else ()
    return lengths.pop() if len(lengths) == 1 else read(part).samples


def samples_of_fields(batch: Batch) -> int:
    """Return the common size of dimension 0 of all tensors. Raises ValueError if sizes differ, or there is no tensor."""
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        raise WrongValue(_problem(batch, f"found sizes {sorted(sizes)}"))
    return sizes.pop()


def _problem(batch: Batch, sizes: str) -> str:
    return (
        f"Cannot tell how many samples a batch of {type(batch).__name__} holds: its tensors and lists should agree on the size "
        f"of dimension 0, {sizes}. Give inputs and targets as tensors or lists with one entry for each sample, or define "
        "count(batch) in a hocket.Task, and split(batch, size) for microbatches."
    )


def is_per_sample(item: Sequence[Any]) -> bool:
    """Whether a list stands for samples (names, boxes) rather than for the fields of a batch."""
    return bool(item) and all(type(part) in _PLAIN or _is_whole(part) for part in item)


def _is_whole(item: object) -> bool:
    return (
        not isinstance(item, Tensor | Mapping | list | tuple) and container_of(item) is None and fields_of(item) is None
    )


#: The usual types of such items.
_PLAIN = (str, int, float, bool, type(None))


def is_numbers(item: Sequence[Any]) -> bool:
    """Whether all items are numbers."""
    return all(isinstance(part, int | float) for part in item)


def signature(item: object) -> Any:
    """Return a value that is equal for samples of one kind."""
    if isinstance(item, Tensor):
        return item.dtype, item.dim()
    if type(item) is list or type(item) is tuple:
        return type(item), frozenset(map(signature, item))
    return type(item)


def holds_scalars(batch: Batch) -> bool:
    """Whether something in a batch belongs to no sample: numbers, strings and tensors without dimensions."""
    if isinstance(batch, Tensor):
        return not batch.dim()
    if isinstance(batch, Mapping):
        return any(map(holds_scalars, batch.values()))
    if container_of(batch) is not None:
        return False
    if (fields := fields_of(batch)) is not None:
        return any(map(holds_scalars, fields.values()))
    if isinstance(batch, list | tuple):
        return not is_per_sample(batch) and any(map(holds_scalars, batch))
    return batch is not None


def _is_list_of_samples(batch: Batch) -> bool:
    """Whether a batch is a list of samples: mappings or tuples of parts whose sizes do not agree, or with numbers."""
    if (
        not isinstance(batch, list | tuple)
        or hasattr(batch, "_fields")
        or len({signature(item) for item in batch}) != 1
    ):
        return False
    first = batch[0]
    if isinstance(first, Mapping):
        if any(item.keys() != first.keys() for item in batch):
            return False
    elif (isinstance(first, list | tuple) and len(set(map(signature, first))) < 2) or not _children(first):
        return False
    return any(holds_scalars(item) or len(set(_sizes(item))) > 1 for item in batch)


def _children(batch: Batch) -> Sequence[Any]:
    """Return the fields of a batch that is not a tensor, container or list of samples."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if (fields := fields_of(batch)) is not None:
        return list(fields.values())
    return batch if isinstance(batch, list | tuple) else ()


def _sizes(batch: Batch) -> Iterator[int]:
    """Yield the sizes of dimension 0, where every sequence holds fields."""
    if (container := container_of(batch)) is not None:
        yield container.count(batch)
    elif isinstance(batch, Tensor):
        if batch.dim():
            yield batch.size(0)
    elif isinstance(batch, list | tuple) and is_per_sample(batch) and not hasattr(batch, "_fields"):
        yield len(batch)
    else:
        for item in _children(batch):
            yield from _sizes(item)


def _sequences(batch: Batch) -> Iterator[Sequence[Any]]:
    """Yield the outermost sequences within a batch that may be lists of samples, and are not certainly."""
    for item in _children(batch):
        if may_hold_samples(item):
            if not is_per_sample(item):
                yield item
        elif not isinstance(item, Tensor) and container_of(item) is None:
            yield from _sequences(item)


def _lengths(batch: Batch) -> Iterator[int]:
    """Yield the numbers of samples, where the sequences within a batch are lists of samples."""
    for item in _children(batch):
        if may_hold_samples(item):
            yield len(item)
        elif isinstance(item, Tensor) or container_of(item) is not None:
            yield from _sizes(item)
        else:
            yield from _lengths(item)


def may_hold_samples(item: Any) -> bool:
    """Whether an object is a sequence of items of one kind."""
    plain = isinstance(item, list | tuple) and not hasattr(item, "_fields")
    return plain and len({signature(part) for part in item}) == 1
