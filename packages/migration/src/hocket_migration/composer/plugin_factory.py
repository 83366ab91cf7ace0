"""Make plug-ins of hocket's by name, and refuse arguments that they have no counterpart of."""

from __future__ import annotations

from typing import Any

import hocket.plugins
from hocket.errors import Unsupported, WrongValue


def make(kind: str, name: str, /, **arguments: Any) -> Any:
    """Return a plug-in. Raises `hocket.plugins.UnknownPluginError`, which says what to install, if there is none."""
    return hocket.plugins.get(kind, name)(**arguments)


def refuse(owner: str, instead: str, /, **given: tuple[Any, Any]) -> None:
    """Raise ValueError for arguments without a counterpart, unless they have their defaults.

    Args:
        owner: what was given the arguments.
        instead: what to write.
        given: value and default by argument.
    """
    for name, (value, default) in given.items():
        if value is not default and value != default:
            raise WrongValue(f"{owner} was given {name}={value!r}, which hocket has no counterpart of. {instead}")


class NoCounterpart(type):
    """The class of names of Composer that can be imported, and refuse to be called."""


def no_counterpart(name: str, instead: str) -> NoCounterpart:
    """Return a class of this name that refuses to be made."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Unsupported(f"hocket has no counterpart of Composer's {name}. {instead}")

    return NoCounterpart(name, (), {"__init__": refused, "__doc__": f"Not available: {instead}"})
