"""Import the public names of a package when they are first used."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import Any

from hocket.help.optional_packages import NotInstalled, module as imported
from hocket.help.ours import is_ours


@functools.cache
def declared(package: str) -> Mapping[str, str]:
    """Return the names that a package imports under ``if TYPE_CHECKING:``, sorted, and the module that each is from.

    They are read from the source of the package, so that type checkers and Python have one list of its public names.
    """
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec and isinstance(spec.loader, InspectLoader) else None
    if source is None:
        raise ImportError(
            f"The source of {package} is missing, where its public names are. Install it with its .py files."
        )
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: str(node.module) for node in imports for alias in node.names}
    return dict(sorted(names.items()))


def lazy(
    package: str, modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562); ``__all__`` is among its attributes.

    Args:
        package: its ``__name__``.
        modules: public name -> the module that defines it, inside the package or anywhere in hocket's packages, "" for the
            package itself. A name that this module does not define is a module inside it. None for the names that the
            package imports under ``if TYPE_CHECKING:``, each ``as`` itself, by which type checkers know that it is public.

    Example:
        >>> from hocket.help.lazy import lazy
        >>> __getattr__, __dir__ = lazy("hocket.data", {"Counts": "batches", "sources": ""})
        >>> __getattr__("Counts")
        <class 'hocket.data.batches.Counts'>
    """

    def names() -> Mapping[str, str]:
        return declared(package) if modules is None else modules

    def getattribute(name: str) -> Any:
        if name == "__all__":  # what is installed
            return [
                name
                for name, place in sorted(names().items())
                if not is_ours(place) or find_spec(place.partition(".")[0])
            ]
        if name not in names():
            raise Absent(package, name, sorted(names()))
        place = names()[name]
        try:
            module = imported(place if is_ours(place) else f"{package}.{place}".rstrip("."))
        except NotInstalled as absent:
            raise AttributeError(absent.msg, name=name) from None
        value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{module.__name__}.{name}")
        setattr(importlib.import_module(package), name, value)
        return value

    return getattribute, lambda: sorted(names())


class Absent(AttributeError):
    """A package has no such name. The text says which it has, and what to write instead; it is found when it is shown.

    Args:
        package: its name.
        name: the name that was asked for.
        known: the names that it has.
    """

    def __init__(self, package: str, name: str, known: Sequence[str]) -> None:
        super().__init__(package, name, known)

    def __str__(self) -> str:
        package, name, known = self.args
        text = f"module '{package}' has no attribute '{name}'; it has {', '.join(known)}"
        if name[0] == "_":
            return text
        from hocket.help import attributes  # only needed for error messages

        write = attributes.instead(package, name, known) or attributes.instead("hocket", name, ())
        return f"{text}. {write}".rstrip()
