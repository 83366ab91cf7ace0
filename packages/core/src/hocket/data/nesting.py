"""Tensors in sequences, mappings and objects with fields: apply a function to all of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from hocket.basics.types import Batch


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Batch) -> Any:
    """Apply ``function`` to every tensor and return the same nesting; everything else is passed through.

    Tensors are found in sequences, mappings, named tuples, dataclasses, attrs classes, `types.SimpleNamespace`, objects with a
    tensor as an attribute, graph batches of torch_geometric and `PackedSequence`. Objects are copied, without a call of their
    ``__init__`` or ``__post_init__``.

    Example:
        >>> import torch
        >>> from hocket.data import map_tensors
        >>> map_tensors(torch.Tensor.tolist, {"image": torch.zeros(2), "name": "a"})
        {'image': [0.0, 0.0], 'name': 'a'}
    """
    return map_nested(function, batch, None)


def map_nested(function: Callable[[torch.Tensor], Any], batch: Batch, device: torch.device | None) -> Any:
    """Apply it as `map_tensors` does. Objects that move themselves are moved to ``device``, unless it is None."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if type(batch) is tuple or type(batch) is list:
        return type(batch)([map_nested(function, item, device) for item in batch])
    if isinstance(batch, Mapping) and (device is None or not hasattr(batch, "shape")):
        return like_mapping(batch, {key: map_nested(function, value, device) for key, value in batch.items()})
    if isinstance(batch, PackedSequence):  # its batch_sizes stay on the CPU, as they are
        return type(batch)(
            *(item if item is batch.batch_sizes else map_nested(function, item, device) for item in batch)
        )
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(map_nested(function, item, device) for item in batch)
    if is_graphs(batch):
        return copy.copy(batch).apply(function)
    if device is not None and _moves_itself(batch):
        moved = copy.copy(batch)  # because its `to` may change it
        returned = moved.to(device)
        return moved if returned is None else returned
    if (fields := fields_of(batch)) is not None:
        mapped = {name: map_nested(function, value, device) for name, value in fields.items()}
        return with_fields(batch, mapped) if any(mapped[name] is not fields[name] for name in fields) else batch
    return batch


def _moves_itself(item: object) -> bool:
    return callable(getattr(item, "to", None)) and not isinstance(item, type) and not hasattr(item, "__array__")


def is_graphs(item: object) -> bool:
    """Whether it is a batch of graphs of torch_geometric, which is not imported to find out."""
    return hasattr(item, "to_data_list") and hasattr(item, "num_graphs") and not isinstance(item, type)


def fields_of(item: object) -> dict[str, Any] | None:
    """Return the fields of an object by name, or None if it has no fields.

    Objects with fields are named tuples, instances of dataclasses and attrs classes, `SimpleNamespace`, and others that have a
    tensor as an attribute, except modules.
    """
    if isinstance(item, type | nn.Module | torch.Tensor):
        return None
    if isinstance(item, tuple):
        return dict(zip(item._fields, item, strict=True)) if hasattr(item, "_fields") else None
    if dataclasses.is_dataclass(item):
        names = [field.name for field in dataclasses.fields(item)]
    elif hasattr(item, "__attrs_attrs__"):
        names = [attribute.name for attribute in item.__attrs_attrs__]
    else:
        held = getattr(item, "__dict__", None)
        if type(held) is not dict or isinstance(item, Mapping | list):
            return None
        if type(item) is not SimpleNamespace and not any(isinstance(value, torch.Tensor) for value in held.values()):
            return None
        names = list(held)
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


def with_fields(item: object, fields: Mapping[str, Any]) -> Any:
    """Return a copy of an object of `fields_of` with other values of some fields."""
    if isinstance(item, tuple):
        return item._replace(**fields)  # type: ignore[attr-defined]  # a named tuple
    copied = copy.copy(item)
    # Of dataclasses and attrs classes also frozen fields, and without converters.
    assign = object.__setattr__ if dataclasses.is_dataclass(item) or hasattr(item, "__attrs_attrs__") else setattr
    for name, value in fields.items():
        assign(copied, name, value)
    return copied


def like_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items``, which has the keys of ``batch``, as the same kind of mapping, or as a dict where that is impossible."""
    if type(batch) is dict:
        return items
    try:
        if isinstance(
            batch, MutableMapping
        ):  # keeps its other attributes, such as the default_factory of a defaultdict
            like: Any = copy.copy(batch)
            like.update(items)
        else:
            like = type(batch)(items)  # type: ignore[call-arg]
        same = like is not batch and list(like) == list(items) and all(like[key] is items[key] for key in items)
    except Exception:  # whatever its constructor makes of a dict
        same = False
    return like if same else items
