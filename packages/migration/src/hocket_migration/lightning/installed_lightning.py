"""Which Lightning a module belongs to: ``lightning.pytorch`` and ``pytorch_lightning`` have classes of their own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from hocket.errors import MissingPackage, WrongType
from hocket.help import installing

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def require(package: str = "") -> ModuleType:
    """Return a package of Lightning, by default the one that is installed. Raises ModuleNotFoundError with what to install."""
    error: ImportError | None = None
    for name in (package,) if package else _PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as raised:
            error = error or raised
    raise MissingPackage(
        "hocket_migration.lightning needs Lightning, which is not installed. Type: "
        f"{installing.command('lightning', 'hocket-migration')}.",
        name="lightning",
    ) from error


def package_of(kind: type) -> str | None:
    """Return the package of Lightning that a class derives from, or None."""
    for base in kind.__mro__:
        for package in _PACKAGES:
            if base.__module__ == package or base.__module__.startswith(f"{package}."):
                return package
    return None


def framework_of(obj: Any, base: str = "LightningModule") -> ModuleType:
    """Return the package of Lightning whose class ``base`` an object is an instance of. Raises TypeError for others."""
    package = package_of(type(obj))
    if package is not None:
        framework = importlib.import_module(package)
        if isinstance(obj, getattr(framework, base)):
            return framework
    require()
    what = obj.__name__ if isinstance(obj, type) else type(obj).__name__
    raise WrongType(
        f"{what} is {'a class' if isinstance(obj, type) else f'not a {base}'}. Give an instance of a {base} of Lightning"
        + (", with parentheses." if isinstance(obj, type) else "; other models are trained by hocket.Trainer itself.")
    )


def framework_of_any(given: Iterable[Any]) -> ModuleType | None:
    """Return the package of Lightning that callbacks or loggers are of, alone or in lists, or None."""
    for each in given:
        for one in each if isinstance(each, Iterable) else [each]:
            if (package := package_of(type(one))) is not None:
                return require(package)
    return None


def unwrapped(model: Any) -> Any:
    """Return a LightningModule that ``torch.compile`` returned, whose steps are compiled; anything else as it is."""
    inner = getattr(model, "_orig_mod", None)
    package = None if inner is None else package_of(type(inner))
    if package is None:
        return model
    return importlib.import_module(f"{package}.utilities.compile")._maybe_unwrap_optimized(model)


def overrides(obj: Any, name: str, base: type) -> bool:
    """Whether an object has a method of its own in place of the one of a base class."""
    method = getattr(obj, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(base, name, None)
