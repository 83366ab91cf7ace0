"""Say whether a drop-in namespace has what a project uses, from the namespace itself."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Collection
from typing import Any

import hocket_migration.lightning.arguments as of_lightning
from hocket_migration.inspecting.names import Module, Symbol
from hocket_migration.inspecting.namespaces import offered
from hocket_migration.inspecting.tables import Kind, sources
from hocket_migration.lightning.callbacks import REFUSED as CALLBACKS
from hocket_migration.transformers.fields import FIELDS, steps_in_backward
from hocket_migration.transformers.overrides import IGNORED_DECISION, REFUSED as OVERRIDES


def refuses(found: Symbol) -> bool:
    """Whether a drop-in Trainer refuses the instances of a class, which are imported from the framework itself."""
    return found.source.name == "lightning" and (found.name in CALLBACKS or found.name == "Tuner")


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
    """Whether instances of a drop-in class do not have an attribute, or refuse its use."""
    if (kind.source, kind.name) == ("transformers", "TrainerControl"):
        return name == IGNORED_DECISION
    cls = _class(kind)
    if cls is None:
        return False
    return not any(name in vars(each) or name in _set_by(each) for each in cls.__mro__)


def _set_by(cls: type) -> tuple[str, ...]:
    """Return the names in a constructor, among them the attributes that it sets."""
    made = vars(cls).get("__init__")
    code = None if made is None else getattr(inspect.unwrap(made), "__code__", None)
    return () if code is None else code.co_names


def refuses_argument(kind: Kind, method: str, name: str, value: ast.expr) -> bool:
    """Whether a drop-in Trainer refuses an argument, unless it is given its default."""
    if (kind.source, kind.name) == ("transformers", "TrainingArguments"):
        refused = name in FIELDS and bool(FIELDS[name].refused) and not _is(value, False, None)
        return refused or (name == "optim" and isinstance(value, ast.Constant) and steps_in_backward(str(value.value)))
    if (kind.source, kind.name) == ("lightning", "Trainer"):
        return _lightning_refuses(kind, method, name, value)
    if (kind.source, kind.name) != ("composer", "Trainer"):
        return False
    trainer: Any = importlib.import_module("hocket_migration.composer.trainer")
    refused = {"__init__": trainer.REFUSED, "fit": trainer.REFUSED_OF_FIT}.get(method, {})
    known = inspect.signature(getattr(trainer.Trainer, method)).parameters
    return name not in known or (name in refused and not _is(value, refused[name][0]))


def _lightning_refuses(kind: Kind, method: str, name: str, value: ast.expr) -> bool:
    try:
        given = ast.literal_eval(value)
    except (ValueError, TypeError):
        made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2][:1].isupper()
        if not made or name not in of_lightning.BY_NAME:
            return method == "__init__" and name not in kind.arguments
        given = object()
    if method != "__init__":
        return name == "ckpt_path" and given in of_lightning.REFUSED_PATHS
    return name not in kind.arguments or of_lightning.refuses(name, given)


def refuses_override(kind: Kind, method: str, parameters: Collection[str] = ()) -> bool:
    """Whether a drop-in Trainer refuses a subclass that overrides a method, with parameters of these names."""
    if (kind.source, kind.name) == ("lightning", "LightningModule"):
        return of_lightning.BATCHES in parameters or method in of_lightning.NOT_CALLED
    return (kind.source, kind.name) == ("transformers", "Trainer") and method in OVERRIDES


def _class(kind: Kind) -> Any:
    if (kind.source, kind.name) == ("lightning", "Trainer"):
        return importlib.import_module("hocket_migration.lightning.trainer").Trainer
    source = sources()[kind.source]
    if not source.whole or kind.open:
        return None
    place = offered(Symbol(source, kind.symbols[0], source.packages[0]))
    return None if place is None else getattr(importlib.import_module(place), kind.symbols[0])


def _is(value: ast.expr, *defaults: Any) -> bool:
    return isinstance(value, ast.Constant) and any(value.value == each for each in defaults)
