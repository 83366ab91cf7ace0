"""The kinds of plug-ins, and the requirements of each."""

from __future__ import annotations

import importlib

#: The kinds of plug-ins. The entry-point group of a kind is ``hocket.v1.<kind>``.
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
    "shards",
    "strategies",
)
#: The base class of a kind, imported together with the first plug-in of that kind. Other kinds only need a callable.
_BASES = {
    "algorithms": "hocket.hookspecs.algorithm:Algorithm",
    "commands": "hocket.hookspecs.command:Command",
    "devices": "hocket.devices:Device",
    "precisions": "hocket.precision:Precision",
    "strategies": "hocket.strategies:Strategy",
}
#: Libraries that the import of a plug-in should not load.
HEAVY = (
    "torchvision", "transformers", "deepspeed", "ray", "wandb", "mlflow", "comet_ml", "tensorboard", "matplotlib", "sklearn",
    "pandas", "tensorflow", "jax",
)  # fmt: skip
#: Kinds whose entry point names an instance. All others name a class, or a function that returns an instance.
_INSTANCES = {"commands"}


def singular(kind: str) -> str:
    """Return the singular of a kind, such as ``algorithm`` for ``algorithms``."""
    return {"strategies": "strategy", "actions": "actions", "shards": "format"}.get(kind, kind.removesuffix("s"))


def misfit(kind: str, obj: object) -> str:
    """Return why ``obj`` cannot be a plug-in of this kind, or empty if it can."""
    base = _BASES.get(kind)
    if base is None:
        if kind in ("callbacks", "loggers"):
            if not isinstance(obj, type):
                return f"it is {_what(obj)} and not a class"
            if _conforms("algorithms", obj):
                return f"{obj.__qualname__} is an algorithm, whose group is hocket.v1.algorithms"
        return "" if callable(obj) else f"it is {_what(obj)} and not a class"
    module, _, name = base.partition(":")
    wanted = getattr(importlib.import_module(module), name)
    if kind in _INSTANCES:
        return "" if isinstance(obj, wanted) else f"it is {_what(obj)} and not a {module}.{name}"
    if not isinstance(obj, type):
        return f"it is {_what(obj)} and not a class"
    return (
        ""
        if issubclass(obj, wanted) or _conforms(kind, obj)
        else f"{obj.__qualname__} is not a subclass of hocket.{name}"
    )


def _conforms(kind: str, cls: type) -> bool:
    """Whether a class that does not inherit from the base still has the members that the bus needs."""
    return kind == "algorithms" and hasattr(cls, "apply") and hasattr(cls, "events") and hasattr(cls, "phase")


def _what(obj: object) -> str:
    return (
        "None"
        if obj is None
        else f"the class {obj.__qualname__}"
        if isinstance(obj, type)
        else f"a {type(obj).__name__}"
    )
