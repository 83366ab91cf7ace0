"""Plug-ins: the installed entry points, and the lookup of a class by name. Never imports torch.

``names(kind)`` and ``get(kind, name)`` look up plug-ins; ``register(kind, name, cls)`` adds one for this process.
``entries()`` lists all plug-ins with their distributions, and ``refresh()`` scans the installed distributions again.
"""

from hocket.plugins.catalog import Entry, entries, get, names, refresh, register, unregister
from hocket.plugins.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    ConflictError,
    HookError,
    OrderError,
    PlanError,
    PluginConfigError,
    PluginError,
    UnknownPluginError,
)
from hocket.plugins.kinds import KINDS

__all__ = [
    "KINDS",
    "AmbiguousPluginError",
    "BrokenPluginError",
    "ConflictError",
    "Entry",
    "HookError",
    "OrderError",
    "PlanError",
    "PluginConfigError",
    "PluginError",
    "UnknownPluginError",
    "entries",
    "get",
    "names",
    "refresh",
    "register",
    "unregister",
]
