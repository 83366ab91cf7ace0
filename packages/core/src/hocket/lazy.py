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
            raise Absent(package, name, sorted(modules))
        try:
            module = imported(modules[name] if is_ours(modules[name]) else f"{package}.{modules[name]}".rstrip("."))
        except NotInstalled as absent:
            raise AttributeError(absent.msg, name=name) from None
        value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
        setattr(importlib.import_module(package), name, value)
        return value

    return getattribute, lambda: sorted(modules)


class Absent(AttributeError):
    """A package has no such name. The text says which it has, and what to write instead; it is found when it is shown.

    Args:
        package: its name.
        name: the name that was asked for.
        there: the names that it has.
    """

    def __init__(self, package: str, name: str, there: Sequence[str]) -> None:
        super().__init__(package, name, there)

    def __str__(self) -> str:
        package, name, there = self.args
        text = f"module '{package}' has no attribute '{name}'; it has {', '.join(there)}"
        if name[0] == "_":
            return text
        from hocket.help import attributes  # only needed for error messages

        write = attributes.instead(package, name, there) or attributes.instead("hocket", name, ())
        return f"{text}. {write}".rstrip()
