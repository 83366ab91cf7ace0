"""Plug-ins: the installed entry points, and the lookup of a class by name. Never imports torch.

``names(kind)`` and ``get(kind, name)`` look up plug-ins; ``register(kind, name, cls)`` adds one for this process.
``entries()`` lists all plug-ins with their distributions, and ``refresh()`` scans the installed distributions again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket.basics.kinds import KINDS as KINDS
    from hocket.basics.plugin_errors import (
        AmbiguousPluginError as AmbiguousPluginError,
        BrokenPluginError as BrokenPluginError,
        ConflictError as ConflictError,
        HookError as HookError,
        OrderError as OrderError,
        PlanError as PlanError,
        PluginConfigError as PluginConfigError,
        PluginError as PluginError,
        UnknownPluginError as UnknownPluginError,
    )
    from hocket.plugins.registry import (
        Entry as Entry,
        entries as entries,
        get as get,
        names as names,
        refresh as refresh,
        register as register,
        unregister as unregister,
    )

__getattr__, __dir__ = lazy(__name__)
