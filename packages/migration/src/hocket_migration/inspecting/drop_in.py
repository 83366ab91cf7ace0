"""Say whether a drop-in namespace has what a project uses, from the namespace itself."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

from hocket_migration.inspecting.names import Module, Symbol
from hocket_migration.inspecting.namespaces import offered
from hocket_migration.inspecting.tables import Kind, sources
from hocket_migration.transformers.fields import FIELDS
from hocket_migration.transformers.overrides import REFUSED as OVERRIDES


def lacks(found: Symbol | Module) -> bool:
    """Whether a namespace that replaces the whole package does not have a name, or refuses its use."""
    if not found.source.whole:
        return False
    place = offered(found)
    if place is None:
        return True
    name = found.name if isinstance(found, Symbol) else found.dotted.rpartition(".")[2]
    return type(getattr(importlib.import_module(place), name)).__name__ == "NoCounterpart"


def lacks_member(kind: Kind, name: str) -> bool:
    """Whether instances of a class in a namespace that replaces the whole package do not have an attribute."""
    cls = _class(kind)
    if cls is None or any(name in vars(each) for each in cls.__mro__):
        return False
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    return code is None or name not in code.co_names  # the attributes that it sets


def refuses_argument(kind: Kind, method: str, name: str, value: ast.expr) -> bool:
    """Whether a drop-in Trainer refuses an argument, unless it is given its default."""
    if (kind.source, kind.name) == ("transformers", "TrainingArguments"):
        return name in FIELDS and bool(FIELDS[name].refused) and not _is(value, False, None)
    if (kind.source, kind.name) != ("composer", "Trainer"):
        return False
    trainer: Any = importlib.import_module("hocket_migration.composer.trainer")
    refused = {"__init__": trainer.REFUSED, "fit": trainer.REFUSED_OF_FIT}.get(method, {})
    known = inspect.signature(getattr(trainer.Trainer, method)).parameters
    return name not in known or (name in refused and not _is(value, refused[name][0]))


def refuses_override(kind: Kind, method: str) -> bool:
    """Whether a drop-in Trainer refuses a subclass that overrides a method."""
    return (kind.source, kind.name) == ("transformers", "Trainer") and method in OVERRIDES


def _class(kind: Kind) -> Any:
    source = sources()[kind.source]
    if not source.whole or kind.open:
        return None
    place = offered(Symbol(source, kind.symbols[0], source.packages[0]))
    return None if place is None else getattr(importlib.import_module(place), kind.symbols[0])


def _is(value: ast.expr, *defaults: Any) -> bool:
    return isinstance(value, ast.Constant) and any(value.value == each for each in defaults)
