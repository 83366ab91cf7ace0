"""State of a plug-in's class and module, which all Trainers of the process share."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdRef


def shared_state(owned: Any) -> dict[str, Any]:
    """Return the attributes of a plug-in's class, its bases beside hocket's, and their modules, by name, as plain data."""
    found: dict[str, Any] = {}
    for name, cls in _classes(owned).items():
        found |= {f"{name}.{key}": _plain(value) for key, value in vars(cls).items() if _counts(key)}
    for module in {getattr(each, "__module__", "") for each in (owned, *_classes(owned).values())}:
        variables = list(vars(sys.modules[module]).items()) if module in sys.modules else []
        found |= {f"{module}.{key}": _plain(value) for key, value in variables if _counts(key)}
    return found


def _classes(owned: Any) -> dict[str, type]:
    classes = inspect.getmro(owned) if isinstance(owned, type) else ()
    return {each.__qualname__: each for each in classes if not foreign(each)}


def _counts(name: str) -> bool:
    return not name.startswith("__") and not name.startswith("_abc_")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value that is equal later only if nothing in ``value`` changed."""
    if isinstance(value, Tensor):
        return (WeakIdRef(value), value._version)
    if isinstance(value, bool | int | float | str | bytes | None.__class__):
        return value
    if depth < 4 and isinstance(value, Mapping | weakref.WeakKeyDictionary) and len(value) < 1000:
        with contextlib.suppress(Exception):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 4 and isinstance(value, list | tuple | set | frozenset) and len(value) < 1000:
        return [
            _plain(item, depth + 1) for item in (value if isinstance(value, list | tuple) else sorted(value, key=repr))
        ]
    if type(value).__module__ == "itertools" and type(value).__name__ == "count":
        return repr(value)
    return id(value)


def state_changes(before: dict[str, Any], owned: Any) -> list[str]:
    """Return the names that differ from an earlier `shared_state`, or are new in the class."""
    after = shared_state(owned)
    found = [name for name in after if name not in before and name.rpartition(".")[0] in _classes(owned)]
    return found + [name for name, value in before.items() if name in after and after[name] != value]


def foreign(cls: type) -> bool:
    """Return whether a class is Python's, torch's or hocket's own."""
    top = cls.__module__.partition(".")[0]
    return top in ("hocket", "torch", "hocket_testkit") or top in sys.stdlib_module_names
