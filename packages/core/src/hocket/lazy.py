"""Import the public names of a package when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.elsewhere import NotInstalled, module as imported
from hocket.ours import is_ours


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562); ``__all__`` is among its attributes.

    The package also imports the names under ``TYPE_CHECKING``, each ``as`` itself, by which type checkers know that it is
    public.

    Args:
        package: its ``__name__``.
        modules: public name -> the module that defines it, inside the package or anywhere in hocket's packages, "" for the
            package itself. A name that this module does not define is a module inside it.

    Example:
        >>> from hocket.lazy import lazy
        >>> __getattr__, __dir__ = lazy("hocket.data", {"Counts": "batches", "sources": ""})
        >>> __getattr__("Counts")
        <class 'hocket.data.batches.Counts'>
    """

    def getattribute(name: str) -> Any:
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise missing(package, name, sorted(modules))
        try:
            module = imported(modules[name] if is_ours(modules[name]) else f"{package}.{modules[name]}".rstrip("."))
        except NotInstalled as absent:
            raise AttributeError(absent.msg, name=name) from None
        value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
        setattr(importlib.import_module(package), name, value)
        return value

    return getattribute, lambda: sorted(modules)


def missing(package: str, name: str, there: Sequence[str]) -> AttributeError:
    """Return the error for a name that a package does not have, with the names ``there``, and what to write instead."""
    text = f"module '{package}' has no attribute '{name}'; it has {', '.join(there)}"
    if name[0] == "_":
        return AttributeError(text)
    from hocket.help import attributes  # only needed for error messages

    write = attributes.instead(package, name, there) or attributes.instead("hocket", name, ())
    return AttributeError(f"{text}. {write}".rstrip())
