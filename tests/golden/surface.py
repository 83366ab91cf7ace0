"""What users and authors of plug-ins can import, and how it is called."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

from hocket.data.stateful import Stateful
from hocket.help.attributes import Elsewhere
from hocket.run.joined import Joined

FILE = Path(__file__).parent / "surface.txt"
#: Modules that docs tell people to import from, each with the names of its ``__all__``, or those without an underscore.
MODULES = (
    "hocket", "hocket.plugins", "hocket.data", "hocket.checkpoints", "hocket.hookspecs", "hocket.testkit", "hocket.surgery",
    "hocket.schedules", "hocket.basics.time", "hocket.basics.dtensors", "hocket.basics.launch_environment", "hocket.strategies",
    "hocket.precision", "hocket.devices", "hocket_cli", "hocket_general", "hocket_general.functional", "hocket_vision",
    "hocket_vision.functional", "hocket_vision.models", "hocket_vision.datasets", "hocket_nlp", "hocket_nlp.functional",
    "hocket_strategies", "hocket_loggers", "hocket_report", "hocket_migration",
)  # fmt: skip


def surface() -> list[str]:
    """One line for each name, and for each public method of a class of ours that it leads to."""
    return [line for module in MODULES for line in _of_module(importlib.import_module(module))]


def _of_module(module: Any) -> list[str]:
    own = [
        name for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", module.__name__) == module.__name__ and not inspect.ismodule(value)
    ]  # fmt: skip
    lines = []
    for name in sorted(getattr(module, "__all__", own or [each for each in dir(module) if each[0] != "_"])):
        value = getattr(module, name)
        if inspect.ismodule(value) and not hasattr(module, "__all__"):  # one that another test has imported
            continue
        lines.append(f"{module.__name__}.{name}{_signature(value)}")
        if inspect.isclass(value) and module.__name__ == "hocket":
            bases = [vars(each) for each in value.__bases__ if each in (Stateful, Joined)]  # which no user names
            members = {
                name: each
                for one in (*bases, vars(value))
                for name, each in one.items()
                if not isinstance(each, Elsewhere)
            }
            lines += [f"  .{name}{_signature(members[name])}" for name in sorted(members) if name[0] != "_"]
    return lines


def _signature(value: Any) -> str:
    value = getattr(value, "__func__", value)
    if not (inspect.isroutine(value) or inspect.isclass(value)) or (inspect.isclass(value) and issubclass(value, Enum)):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    # Without annotations, which each version of Python prints in its own way.
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r" at 0x\w+|<class '([\w.]+)'>", r"\1", str(inspect.Signature(shown)))
