"""Errors of plug-ins. Every message says what was given, what is allowed and what to type next."""

from __future__ import annotations

from hocket.errors import Mistake


class PluginError(Mistake):
    """Base class of all plug-in errors."""


class UnknownPluginError(PluginError, LookupError):
    """No installed or registered plug-in of this kind has the name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several distributions provide one short name."""


class BrokenPluginError(PluginError):
    """A plug-in cannot be imported or instantiated; the original error is its ``__cause__``."""


class PluginConfigError(PluginError, TypeError, ValueError):
    """The configuration of a plug-in does not fit its signature."""


class HookError(PluginError, TypeError):
    """A plug-in implements a hook that does not exist, or asks for an argument that the hook does not have."""


class ConflictError(PluginError):
    """Two plug-ins cannot be combined."""


class OrderError(PluginError):
    """The ``before`` and ``after`` constraints of algorithms form a cycle."""


class PlanError(PluginError):
    """The parts of a run do not fit together."""


def summarize(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, even if its ``__str__`` fails."""
    try:
        first = str(error).strip().partition("\n")[0]
    except Exception:
        first = ""
    return f"{type(error).__name__}: {first[:300]}".rstrip(": ")
