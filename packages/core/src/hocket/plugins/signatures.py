"""Signatures: the types of arguments, and whether plain values such as those of a configuration file fit them."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hocket.help.names import closest
from hocket.help.ours import is_ours

_TEXT_AND_NUMBERS = bool | int | float | str | None


def hints(target: object, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the annotations of the arguments of a class or function, omitting those that cannot be evaluated.

    Annotations may refer to names imported under TYPE_CHECKING only; ``names`` provides some of them.
    """
    called: Any = getattr(target, "__init__", None) if isinstance(target, type) else target
    function = inspect.unwrap(called)
    function = getattr(function, "func", function)  # a functools.partial
    scope = {**getattr(function, "__globals__", {}), **(names or {})}
    known = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        try:
            single = types.SimpleNamespace(__annotations__={name: annotation})
            known[name] = typing.get_type_hints(single, scope, scope)[name]
        except Exception:
            continue
    return known


def members(hint: object) -> list[Any]:
    """Return the alternatives of a union, or the annotation itself; annotations of a value are resolved first."""
    hint = getattr(hint, "__value__", getattr(hint, "__supertype__", hint))  # `type X = …`, NewType
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [member for option in typing.get_args(hint) for member in members(option)]
    return [hint]


def choice(value: object, hint: object) -> Any:
    """Return the value of a Literal in an annotation that a value resembles, or else the first; None without a Literal."""
    choices = [each for one in members(hint) if typing.get_origin(one) is typing.Literal for each in one.__args__]
    near = closest(value, map(str, choices))
    return next((each for each in choices if str(each) == near), next(iter(choices), None))


def fits(value: object, hint: object) -> bool:
    """Whether a value may fit an annotation. What cannot be checked fits."""
    return any(_fits(value, member) for member in members(hint))


def _fits(value: object, hint: object) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint is float or hint is int:
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    cls = origin or hint
    if not isinstance(cls, type) or cls is object:
        return True
    if isinstance(value, str) and (issubclass(cls, os.PathLike) or cls in (bytes, complex)):
        return issubclass(cls, os.PathLike)
    if issubclass(cls, enum.Enum) and isinstance(value, str):
        return value in cls.__members__ or isinstance(value, cls)
    if is_ours(cls.__module__):
        return _is(value, cls)  # so that 5 is not a Time
    if isinstance(value, list | tuple) and cls in SEQUENCES:
        kinds = item_hints(hint, len(value))
        return kinds is not None and all(map(fits, value, kinds))
    if isinstance(value, dict) and cls in MAPPINGS:
        return not inner or all(fits(key, inner[0]) and fits(item, inner[1]) for key, item in value.items())
    if isinstance(value, str) and cls in SEQUENCES:
        return False  # a text is a sequence of letters, which nobody means
    return _is(value, cls) or not isinstance(value, _TEXT_AND_NUMBERS)


SEQUENCES = (list, tuple, Sequence, Iterable, collections.abc.Collection, collections.abc.MutableSequence)
MAPPINGS = (dict, Mapping, collections.abc.MutableMapping)


def _is(value: object, cls: type) -> bool:
    try:
        return isinstance(value, cls)
    except TypeError:  # a protocol that cannot be checked
        return True


def item_hints(hint: object, length: int) -> list[Any] | None:
    """Return the annotations of the items of a list or tuple, or None if it may not have this length."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple:
        return [inner[0] if inner else Any] * length
    if len(inner) == 2 and inner[1] is ...:
        return [inner[0]] * length
    return list(inner) if len(inner) == length else None
