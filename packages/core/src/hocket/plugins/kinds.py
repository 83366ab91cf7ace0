"""What can be a plug-in of which kind."""

from __future__ import annotations

import importlib
from typing import Any

#: What plug-ins can be. The entry-point group of a kind is ``hocket.v1.<kind>``.
KINDS = (
    "actions",
    "algorithms",
    "callbacks",
    "commands",
    "datasets",
    "devices",
    "loggers",
    "optimizers",
    "precisions",
    "schedules",
    "strategies",
)
#: The base class of a kind, imported when a plug-in of that kind is. The other kinds are anything that can be called.
_BASES = {
    "algorithms": "hocket.algorithm:Algorithm",
    "commands": "hocket.cli.command:Command",
    "devices": "hocket.devices:Device",
    "precisions": "hocket.precision:Precision",
    "strategies": "hocket.strategies:Strategy",
}
#: Kinds of which an instance is declared; of all others a class, or a function that returns one.
_INSTANCES = {"commands"}


def singular(kind: str) -> str:
    """``algorithm`` for ``algorithms``."""
    return {"strategies": "strategy", "actions": "actions"}.get(kind, kind.removesuffix("s"))


def misfit(kind: str, obj: Any) -> str:
    """Return why what an entry point leads to cannot be a plug-in of its kind, or empty if it can."""
    base = _BASES.get(kind)
    if base is None:
        if kind in ("callbacks", "loggers") and not isinstance(obj, type):
            return f"it is {_what(obj)} and not a class"
        return "" if callable(obj) else f"it is {_what(obj)} and not a class"
    module, _, name = base.partition(":")
    wanted = getattr(importlib.import_module(module), name)
    if kind in _INSTANCES:
        return "" if isinstance(obj, wanted) else f"it is {_what(obj)} and not a {module}.{name}"
    if not isinstance(obj, type):
        return f"it is {_what(obj)} and not a class"
    return (
        "" if issubclass(obj, wanted) or _alike(kind, obj) else f"{obj.__qualname__} is not a subclass of hocket.{name}"
    )


def _alike(kind: str, cls: type) -> bool:
    """Whether a class that does not inherit has all the same what the bus asks of it."""
    return kind == "algorithms" and hasattr(cls, "apply") and hasattr(cls, "events") and hasattr(cls, "phase")


def _what(obj: Any) -> str:
    return (
        "None"
        if obj is None
        else f"the class {obj.__qualname__}"
        if isinstance(obj, type)
        else f"a {type(obj).__name__}"
    )
