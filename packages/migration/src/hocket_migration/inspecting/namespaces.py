"""Find the names of a framework in the drop-in namespace that replaces it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Collection

from hocket_migration.inspecting.names import Module, Symbol


def offered(found: Symbol | Module) -> str | None:
    """Return the module of the drop-in namespace that offers a name of a framework, or None.

    A public name may be at another place than in the framework: the namespace itself is tried first, then its modules. A
    function or module of a namespace that replaces the whole package is at the same place, or a function in a module above.
    """
    source = found.source
    if not source.namespace:
        return None
    if isinstance(found, Symbol):
        places = _above(source.namespace, found.dotted)
        return next((place for place in places if found.name in _names(place)), None)
    parent, _, name = found.dotted.rpartition(".")
    if not source.whole or not parent:
        return None
    exact, *above = reversed(_above(source.namespace, parent))
    if name in _names(exact) or _is_module(f"{exact}.{name}"):
        return exact
    return next((place for place in above if name in _names(place) and not _is_module(f"{place}.{name}")), None)


def same_place(found: Symbol | Module) -> str | None:
    """Return the place in the namespace that has the same attributes after its package, or None if one is missing."""
    dotted = found.dotted if isinstance(found, Module) else f"{found.dotted}.{found.name}"
    place = found.source.namespace
    for part in dotted.split(".")[1:]:
        if part not in _names(place):
            return None
        place = f"{place}.{part}"
    return place


def module_at_the_place_of(module: Module) -> str | None:
    """Return the module at the same place of a namespace that replaces the whole package, or None."""
    place = _above(module.source.namespace, module.dotted)[-1]
    return place if module.source.whole and _is_module(place) else None


def _above(namespace: str, dotted: str) -> list[str]:
    inner = dotted.split(".")[1:]
    return [".".join([namespace, *inner[:count]]) for count in range(len(inner) + 1)]


def _names(module: str) -> Collection[str]:
    with contextlib.suppress(ImportError):
        return dir(importlib.import_module(module))
    return ()


def _is_module(dotted: str) -> bool:
    with contextlib.suppress(ImportError):  # also if the parent is not a package
        return importlib.util.find_spec(dotted) is not None
    return False
