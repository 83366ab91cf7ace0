"""A tree of dicts and lists as the JSON of a file, with references to tensors. Needs no torch.

JSON's own values stand for themselves. What JSON lacks is an object with one key: ``{"$tensor": {…}}``, ``{"$float": "nan"}``,
``{"$int": "hex digits"}`` (beyond 64 bits), ``{"$bytes": "base64"}``, ``{"$text": "base64"}`` (strings with lone
surrogates), ``{"$tuple": […]}``. A dict's own keys that begin with ``$`` get a second one.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hocket.errors import WrongType, WrongValue

#: Maximum number of levels of a tree. It is far below the interpreter's recursion limit, and stops cycles.
DEPTH = 100


def to_json(value: Any, tensor: Callable[[str, Any], dict[str, Any] | None], path: str = "", depth: int = 0) -> Any:
    """Encode a tree as JSON. ``tensor(path, value)`` returns the value of ``$tensor``, or None if the value is not a tensor.

    Subclasses of dict, list, tuple, str, int and float are written as their base class.
    Raises TypeError for everything else, naming the path, and ValueError for deep nesting.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _text(str.__str__(value))
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**64 else {"$int": f"{number:x}"}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if depth >= DEPTH:
        raise WrongValue(f"{path[:80]}…: a checkpoint's tree has at most {DEPTH} levels; does it contain itself?")
    if isinstance(value, Mapping):
        made = {}
        for key, child in value.items():
            below = join(path, key)
            made[f"${key}" if key[:1] == "$" else str.__str__(key)] = to_json(child, tensor, below, depth + 1)
        return made
    if isinstance(value, list | tuple):
        items = [to_json(child, tensor, join(path, str(i)), depth + 1) for i, child in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if (node := tensor(path, value)) is not None:
        return {"$tensor": node}
    raise WrongType(
        f"{path or 'the tree'}: a {type(value).__module__}.{type(value).__qualname__} cannot go into a checkpoint, only dicts, "
        "lists and tuples of tensors, numbers, strings, bools, None and bytes. Convert it, as with .item(), .tolist() "
        "or torch.from_numpy."
    )


def join(path: str, key: Any) -> str:
    """Return the dotted path of a child. Raises TypeError for keys that are not text."""
    if not isinstance(key, str):
        raise WrongType(
            f"{path or 'the tree'}: the key {key!r} is of type {type(key).__name__}; a checkpoint's dicts have str keys. "
            "Write str(key), and convert it back after reading."
        )
    if not key.isascii() and any("\ud800" <= character <= "\udfff" for character in key):
        raise WrongType(f"{path or 'the tree'}: the key {key!r} has surrogates, which is not text.")
    return f"{path}.{key}" if path else key


def _text(text: str) -> Any:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return {"$text": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}
    return text


def from_json(node: Any, tensor: Callable[[dict[str, Any]], Any], depth: int = 0) -> Any:
    """Decode JSON to a tree; ``tensor`` resolves references. Raises ValueError for JSON that `to_json` never writes."""
    if isinstance(node, list):
        return [from_json(child, tensor, depth + 1) for child in _shallow(node, depth)]
    if not isinstance(node, dict):
        return node
    if (mark := special(node)) is None:
        return {
            key[1:] if key.startswith("$") else key: from_json(child, tensor, depth + 1)
            for key, child in _shallow(node, depth).items()
        }
    inner = node[mark]
    if mark == "$tensor" and isinstance(inner, dict):
        return tensor(inner)
    if mark == "$tuple" and isinstance(inner, list):
        return tuple(from_json(child, tensor, depth + 1) for child in _shallow(inner, depth))
    if isinstance(inner, str):
        if mark == "$float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if mark == "$int":
            return int(inner, 16)
        if mark == "$bytes":
            return base64.b64decode(inner, validate=True)
        if mark == "$text":
            return base64.b64decode(inner, validate=True).decode("utf-8", "surrogatepass")
    raise WrongValue(f"{mark!r} with {str(inner)[:40]!r} stands for nothing")


def _shallow(node: Any, depth: int) -> Any:
    if depth >= 2 * DEPTH:
        raise WrongValue(f"it has more than {DEPTH} levels")
    return node


def special(node: Any) -> str | None:
    """Return the marker of a special object such as ``$tensor``, or None. Raises ValueError for a marker among other keys."""
    if not isinstance(node, dict):
        return None
    marks = [key for key in node if key.startswith("$") and not key.startswith("$$")]
    if marks and len(node) > 1:
        raise WrongValue(f"{marks[0]!r} is among other keys")
    return marks[0] if marks else None


def leaves(node: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield dotted path and JSON of all leaves: everything but nonempty dicts, lists and tuples."""
    if depth > 2 * DEPTH:
        raise WrongValue(f"it has more than {DEPTH} levels")
    children = list(_children(node))
    if not children:
        yield path, node
    for key, child in children:
        yield from leaves(child, f"{path}.{key}" if path else key, depth + 1)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    mark = special(node)
    if isinstance(node, list) or mark == "$tuple":
        items = node[mark] if mark else node
        yield from ((str(i), child) for i, child in enumerate(items))
    elif isinstance(node, dict) and mark is None:
        yield from ((key[1:] if key.startswith("$") else key, child) for key, child in node.items())


def select(node: Any, globs: Sequence[str], path: str = "") -> Any:
    """Select the values of a tree's JSON whose path, or a path above them, matches a glob. None if nothing matches.

    Lists and tuples lose the items that do not match. A ``*`` also matches dots.
    """
    kept = {}
    for key, child in _children(node):
        below = f"{path}.{key}" if path else key
        if any(fnmatchcase(below, glob) for glob in globs):
            kept[key] = child
        elif (rest := select(child, globs, below)) is not None:
            kept[key] = rest
    if not kept:
        return None
    if isinstance(node, list):
        return list(kept.values())
    if special(node):
        return {"$tuple": list(kept.values())}
    return {f"${key}" if key.startswith("$") else key: child for key, child in kept.items()}
