"""Errors for libraries that are not installed."""

from __future__ import annotations

import importlib
from typing import Any

from hocket.errors import MissingPackage


def require(module: str, needs: str) -> Any:
    """Import a library. Raises ModuleNotFoundError that names what needs it, and what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingPackage(
            f"{needs} needs the package {package}. Type: pip install {package}.", name=package
        ) from None
