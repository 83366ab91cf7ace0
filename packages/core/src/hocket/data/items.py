"""Find and replace the parts of a batch by name or index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.data.errors import MissingPartError
from hocket.data.nesting import like_mapping, with_fields

if TYPE_CHECKING:
    from hocket.basics.types import Batch, Where


def get_item(batch: Batch, key: Any) -> Any:
    """Return ``batch[key]`` for a mapping or a sequence, and the attribute ``key`` for anything else and for named tuples.

    Example:
        >>> from hocket.data import get_item
        >>> get_item({"label": 3}, "label")
        3
    """
    if isinstance(batch, Mapping | list | tuple) and not _is_field(batch, key):
        return batch[key]
    return getattr(batch, key)


def _is_field(batch: Batch, key: object) -> bool:
    return isinstance(key, str) and isinstance(batch, tuple) and key in getattr(batch, "_fields", ())


def part(batch: Batch, where: Where, what: str = "batch") -> Any:
    """Return the part of a batch at a name or index, or what a function returns for it.

    Args:
        what: the batch in messages, such as ``"model's output"``.

    Raises:
        MissingPartError: there is no such part. The message lists those there are.
    """
    if callable(where):
        return where(batch)
    try:
        return get_item(batch, where)
    except (KeyError, IndexError, AttributeError, TypeError):
        parts = (
            list(batch)
            if isinstance(batch, Mapping)
            else list(batch._fields)
            if hasattr(batch, "_fields")
            else f"{len(batch)} items"
            if isinstance(batch, list | tuple)
            else "no such attribute"
        )
        raise MissingPartError(
            f"The {what}, a {type(batch).__name__}, has nothing at {where!r}; it has {parts}."
        ) from None


def set_item(batch: Batch, key: Any, value: Any) -> Any:
    """Return a copy of a batch with ``value`` at ``key``.

    Raises KeyError, IndexError or AttributeError if there is nothing at ``key`` to replace.

    Example:
        >>> from hocket.data import set_item
        >>> set_item((1, 2), 1, 5)
        (1, 5)
    """
    get_item(batch, key)
    if isinstance(batch, Mapping):
        return like_mapping(batch, {**batch, key: value})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch._replace(**{key if isinstance(key, str) else batch._fields[key]: value})  # type: ignore[attr-defined]
    if isinstance(batch, list | tuple):
        index = range(len(batch))[key]
        return type(batch)(value if i == index else item for i, item in enumerate(batch))
    return with_fields(batch, {key: value})
