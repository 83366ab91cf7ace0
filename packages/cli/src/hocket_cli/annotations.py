"""Annotations of arguments: which of their members a node of a configuration may be for, and the values in words."""

from __future__ import annotations

import enum
import os
import typing
from collections.abc import Callable
from typing import Any

from hocket.plugins.signatures import MAPPINGS, SEQUENCES, members


def mapping_hint(hint: object) -> Any:
    """Return the member of an annotation that takes an unchanged mapping, or None."""
    accepting = [part for part in members(hint) if (typing.get_origin(part) or part) in (*MAPPINGS, Any, object)]
    return accepting[0] if accepting else None


def sequence_hints(hint: object) -> list[Any]:
    """Return the members of an annotation that accept a list."""
    return [member for member in members(hint) if (typing.get_origin(member) or member) in (*SEQUENCES, Any, object)]


def callables(hint: object) -> list[Any]:
    """Return the members of an annotation that are functions."""
    return [member for member in members(hint) if (typing.get_origin(member) or member) is Callable]


def described(hint: object) -> str:
    """Describe the values that an annotation accepts: ``a number or null``."""
    words = list(dict.fromkeys(word for member in members(hint) for word in _described(member)))
    if set(words) & {"a number", "an integer", "text"}:  # what a file can say
        words = [word for word in words if not word.startswith("an object")]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


_WORDS = {float: "a number", int: "an integer", bool: "true, false", str: "text", type(None): "null", None: "null"}


def _described(hint: object) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    cls = origin or hint
    if origin is typing.Literal:
        return [repr(choice) for choice in inner]
    if hint in _WORDS:
        return _WORDS[hint].split(", ")
    if cls is Callable:
        return ["a function"]
    if cls in MAPPINGS:
        return ["a mapping"]
    if cls is tuple and inner and ... not in inner:
        return [f"a list of {len(inner)} ({'; '.join(map(described, inner))})"]
    if cls in SEQUENCES:
        plain = not inner or inner[0] is Any or isinstance(inner[0], typing.TypeVar)
        return ["a list" if plain else f"a list (each {described(inner[0])})"]
    if not isinstance(cls, type):
        return ["any value"]
    if issubclass(cls, enum.Enum):
        return [repr(name) for name in cls.__members__]
    return ["a path" if issubclass(cls, os.PathLike) else f"an object of class {cls.__qualname__}"]
