"""Import the public names of a package when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562).

    The package also imports the names under ``TYPE_CHECKING``, for type checkers.

    Args:
        package: its ``__name__``.
        modules: public name -> the module of the package that defines it, "" for the package itself. A name that this
            module does not define is a module inside it.

    Example:
        >>> from hocket.lazy import lazy
        >>> __getattr__, __dir__ = lazy("hocket.data", {"Counts": "batches", "sources": ""})
        >>> __getattr__("Counts")
        <class 'hocket.data.batches.Counts'>
    """

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'; it has {', '.join(sorted(modules))}")
        module = importlib.import_module(f"{package}.{modules[name]}".rstrip("."))
        value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
        setattr(importlib.import_module(package), name, value)
        return value

    return getattribute, lambda: sorted(modules)
