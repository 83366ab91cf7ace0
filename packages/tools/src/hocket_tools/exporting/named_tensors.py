"""The tensors of inputs and outputs by name, in any nesting of mappings, sequences and objects with fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hocket.data.nesting import fields_of, map_tensors
from hocket.errors import WrongValue


def named_tensors(value: Any, alone: str) -> dict[str, Tensor]:
    """Return the tensors of a value by name, which are identifiers, in the order of `hocket.data.nesting.map_tensors`.

    Args:
        alone: the name of a tensor that is not part of anything, and of the items of a sequence: ``"output_0"``.

    Example:
        >>> import torch
        >>> from hocket_tools.exporting.named_tensors import named_tensors
        >>> list(named_tensors({"logits": torch.ones(2), "states": (torch.ones(2), torch.ones(2))}, "output"))
        ['logits', 'states_0', 'states_1']
    """
    named: dict[str, Tensor] = {}
    for path, tensor in _walk(value, ()):
        keys = path if path and isinstance(path[0], str) else (alone, *path)
        name = re.sub(r"\W", "_", "_".join(map(str, keys)))
        name = f"_{name}" if name[:1].isdigit() else name
        while name in named:
            name += "_"
        named[name] = tensor
    return named


def filled(template: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a copy of the template with other tensors, in the order of `named_tensors`."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), template)


def check_nesting(value: Any, what: str) -> None:
    """Raise WrongValue for containers whose tensors have no names, such as graphs and packed sequences."""
    in_order: list[Tensor] = []
    map_tensors(lambda tensor: in_order.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    if list(map(id, named_tensors(value, what).values())) != list(map(id, in_order)):
        raise WrongValue(
            f"The {what} of the model hold a container that is no mapping, sequence or object with fields, such as a batch of "
            "graphs or a packed sequence, and cannot be exported. Give the model tensors, or dicts and lists of them."
        )


def _walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        children = ((str(key), child) for key, child in value.items())
    elif (fields := fields_of(value)) is not None:
        children = fields.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        yield from _walk(child, (*path, key))
