"""Plug-ins: what is installed, and how a name becomes a class. Never imports torch.

``names(kind)`` and ``get(kind, name)`` look up, ``register(kind, name, cls)`` adds one for this process, ``entries()`` lists
everything with its distribution, ``refresh()`` looks at the installed distributions again.
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
