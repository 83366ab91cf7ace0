"""State as plain data in memory: nested dicts and lists of tensors, numbers, strings, bytes and None, and back again.

`hocket_checkpoints.storage.tree_json` writes plain data to a file.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hocket.basics.dtensors import full
from hocket.basics.sparse_quantized import put_together, taken_apart
from hocket.errors import WrongType

#: By torch's name.
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(value: object, where: str = "the state", gather: bool = True) -> Any:
    """Encode ``value`` as dicts with string keys, lists, and leaves that are tensors, bool, int, float, str, bytes or None.

    Other supported values (tuples, other keys, sets, NumPy arrays and numbers, dtypes and devices) become a dict with one key
    that begins with ``~`` and names the type. Tensors are detached and not copied; sharded ones are gathered by a collective,
    unless ``gather`` is False. Sparse and quantized ones become several. Raises TypeError for anything else, naming the path.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        parts = taken_apart(value)
        if parts is not None:
            return {"~tensor": parts}
        return full(value.detach()) if gather else value.detach()
    if isinstance(value, Counter):
        return {"~counter": _items(value, where, gather)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: encode(item, f"{where}/{key}", gather) for key, item in value.items()}
        if all(type(key) is int for key in value):
            return {"~int": {str(key): encode(item, f"{where}/{key}", gather) for key, item in value.items()}}
        return {"~items": _items(value, where, gather)}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            elements: Iterable[Any] = value
            items = [encode(item, f"{where}/{index}", gather) for index, item in enumerate(elements)]
            return items if kind is list else {name: items}
    if isinstance(value, torch.dtype | torch.device):
        return {"~torch": str(value).removeprefix("torch.")}
    if type(value).__module__ == "numpy":
        return _from_numpy(value, where)
    for plain in (int, float, str, bytes):
        if isinstance(value, plain):  # subclasses such as enumerations: their plain value
            return plain(value)  # type: ignore[arg-type]  # each is given its own kind
    raise WrongType(
        f"{where} holds a {type(value).__qualname__}, which is not kept in checkpoints. Keep tensors, numbers, strings, bytes, "
        "None, and dicts, lists and tuples of them; or give what keeps it state_dict() and load_state_dict()."
    )


def decode(value: object, copy: bool = True) -> Any:
    """Undo :func:`encode`; with ``copy`` the tensors are copies, so that the tree can be reused."""
    return _decode(_copied(value) if copy else value)


def _copied(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _decode(value: object) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((name, inside),) = value.items()
        if name in _DECODERS:
            return _DECODERS[name](inside)
    return {key: _decode(item) for key, item in value.items()}


_SEQUENCES: dict[str, Any] = {
    "~tuple": tuple,
    "~set": (set, frozenset),
    "~deque": deque,
    "": list,
}


def _items(value: Mapping[Any, Any], where: str, gather: bool) -> list[Any]:
    return [[encode(key, where), encode(item, f"{where}/{key}", gather)] for key, item in value.items()]


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(_decode(key), _decode(item)) for key, item in items]


def _from_numpy(value: Any, where: str) -> Any:
    import numpy as np

    try:
        tensor = torch.from_numpy(np.array(value))  # a copy, of one dimension more than a number has
    except TypeError:
        raise WrongType(
            f"{where} holds a NumPy {type(value).__name__} of {value.dtype}, which is not kept in checkpoints."
        ) from None
    return {"~array" if isinstance(value, np.ndarray) else "~scalar": tensor}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "~tuple": lambda items: tuple(_decode(items)),
    "~set": lambda items: set(_decode(items)),
    "~deque": lambda items: deque(_decode(items)),
    "~int": lambda items: {int(key): _decode(item) for key, item in items.items()},
    "~items": lambda items: dict(_pairs(items)),
    "~counter": lambda items: Counter(dict(_pairs(items))),
    "~array": lambda tensor: tensor.numpy(),
    "~scalar": lambda tensor: tensor.numpy()[()],
    "~tensor": put_together,
    "~torch": lambda name: DTYPES.get(name) or torch.device(name),
}


def json_like(value: object) -> Any:
    """Return JSON-like values unchanged, and other objects as their class names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_like(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_like(item) for item in value]
    return getattr(value, "__qualname__", None) or type(value).__qualname__
