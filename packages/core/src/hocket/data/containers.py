"""Containers of samples that are neither sequences nor mappings: how their samples are counted, taken and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.data.nesting import is_graphs
from hocket.errors import WrongType, WrongValue

Batch = TypeVar("Batch")


class Container(NamedTuple):
    """The operations of one type; see `register_batch`."""

    count: Callable[[Any], int]
    take: Callable[[Any, list[int]], Any]
    join: Callable[[Sequence[Any]], Any]


def register_batch(
    kind: type[Batch],
    *,
    count: Callable[[Batch], int],
    take: Callable[[Batch, list[int]], Batch],
    join: Callable[[Sequence[Batch]], Batch],
) -> None:
    """Say how batches of a type are counted, divided and joined: for microbatches, ranks, ``accumulate=`` and plain models.

    hocket calls these functions for objects of the type or a subclass, in this process, also inside other batches. To move a
    batch it calls the type's own ``to(device)``. `PackedSequence`, jagged nested tensors and torch_geometric's batches of
    graphs need no registration.

    Args:
        kind: the type.
        count: returns the number of samples.
        take: returns a batch of the samples with these indices, in this order.
        join: returns one batch of all samples of several, in order.

    Raises:
        TypeError: ``kind`` is no class, or is one that hocket divides itself: a tensor, a list, a tuple or a dict.

    Example:
        >>> from hocket.data import count, register_batch, split
        >>> class Words:
        ...     def __init__(self, *words): self.words = words
        >>> register_batch(
        ...     Words, count=lambda batch: len(batch.words), take=lambda batch, at: Words(*(batch.words[i] for i in at)),
        ...     join=lambda parts: Words(*(word for part in parts for word in part.words)),
        ... )
        >>> count(Words("a", "b", "c")).samples, [part.words for part in split(Words("a", "b", "c"), 2)]
        (3, [('a', 'b'), ('c',)])
    """
    if not isinstance(kind, type) or kind in (object, Tensor, list, tuple, dict):
        raise WrongType(
            f"register_batch was given {kind!r}. It takes a class of batches, such as dgl.DGLGraph; lists, tuples, dicts and "
            "tensors are divided already: for another way define count and split in a hocket.Task."
        )
    _REGISTERED[kind] = Container(count, take, join)


def container_of(item: object) -> Container | None:
    """Return how to divide an object that is a container of samples; None for anything else."""
    if isinstance(item, Tensor):
        return _JAGGED if item.is_nested and item.layout is torch.jagged else None
    for base in type(item).__mro__[:-1]:
        if base in _REGISTERED:
            return _REGISTERED[base]
    return _GRAPHS if is_graphs(item) else None


# --- packed sequences


def _take_sequences(packed: PackedSequence, indices: list[int]) -> PackedSequence:
    sequences = unpack_sequence(packed)
    in_order = packed.sorted_indices is None and indices == sorted(indices)
    return pack_sequence([sequences[index] for index in indices], enforce_sorted=in_order)


def _join_sequences(parts: Sequence[PackedSequence]) -> PackedSequence:
    sequences = [sequence for part in parts for sequence in unpack_sequence(part)]
    lengths = [len(sequence) for sequence in sequences]
    in_order = all(part.sorted_indices is None for part in parts) and lengths == sorted(lengths, reverse=True)
    return pack_sequence(sequences, enforce_sorted=in_order)


# --- jagged nested tensors


def _take_rows(nested: Any, indices: list[int]) -> Tensor:
    rows = _rows(nested)
    return _nested([rows[index] for index in indices], nested.offsets())


def _join_rows(parts: Sequence[Any]) -> Tensor:
    return _nested([row for part in parts for row in _rows(part)], parts[0].offsets())


def _rows(nested: Any) -> list[Tensor]:
    if not nested.is_contiguous():
        raise WrongValue(
            f"A jagged tensor of shape {tuple(nested.shape)} is not contiguous, so it cannot be divided into samples. Give "
            "nested.contiguous(), or define split and join in a hocket.Task."
        )
    ends = nested.offsets().tolist()
    return [nested.values()[start:end] for start, end in pairwise(ends)]


def _nested(rows: list[Tensor], before: Tensor) -> Tensor:
    """Return a jagged tensor of these rows. ``before``: the offsets of what they are from.

    Operations of two jagged tensors need the same offsets, not equal ones. So tensors that shared them share the new ones.
    """
    offsets = torch.tensor([0, *accumulate(map(len, rows))], dtype=before.dtype, device=before.device)
    known = _OFFSETS.setdefault(before, [])
    if (shared := next((tensor for tensor in known if torch.equal(tensor, offsets)), None)) is None:
        known.append(shared := offsets)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), shared)


#: Offsets -> those of the tensors that were made of tensors with them.
_OFFSETS = WeakTensorKeyDictionary()


# --- graphs


def _of_graphs(batch: Any, graphs: list[Any]) -> Any:
    """Return a batch of these graphs with the same assignment vectors as ``batch`` has."""
    keys = batch.keys()
    followed = [key.removesuffix("_batch") for key in keys if key.endswith("_batch")]
    made_by: Any = next(base for base in type(batch).__mro__ if "from_data_list" in vars(base))
    joined = made_by.from_data_list(graphs, follow_batch=followed)
    if lost := set(keys) - set(joined.keys()):
        raise WrongValue(
            f"A {type(batch).__name__} has {', '.join(sorted(lost))}, which was added after the graphs were collated, so it "
            "is not known which graph it belongs to. Add it to each graph in the data set, or define split in a hocket.Task."
        )
    return joined


def _take_graphs(batch: Any, indices: list[int]) -> Any:
    graphs = batch.to_data_list()
    return _of_graphs(batch, [graphs[index] for index in indices])


def _join_graphs(parts: Sequence[Any]) -> Any:
    return _of_graphs(parts[0], [graph for part in parts for graph in part.to_data_list()])


_REGISTERED: dict[type, Container] = {
    PackedSequence: Container(lambda packed: int(packed.batch_sizes[0]), _take_sequences, _join_sequences)
}
_JAGGED = Container(lambda nested: int(nested.size(0)), _take_rows, _join_rows)
_GRAPHS = Container(lambda batch: int(batch.num_graphs), _take_graphs, _join_graphs)
