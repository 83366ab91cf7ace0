"""Import optional libraries, such as torchao, and say what to install if one is missing."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from hocket.errors import MissingPackage
from hocket.help import installing
from hocket_tools.tracing import quiet


def torchao(module: str) -> Any:
    """Return a module of torchao, such as ``"quantization"``, without its lines about extensions that it does not have.

    Raises:
        hocket.errors.MissingPackage: torchao is not installed, or has no such module in this version.
    """
    with quiet("torch.utils._pytree", logging.ERROR):
        return imported(f"torchao.{module}", "torchao")


def imported(module: str, extra: str) -> Any:
    """Return a module of a library that an extra of hocket-tools installs. Raises MissingPackage."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        install = installing.command(extra, "hocket-tools")
        raise MissingPackage(f"{module} is needed here and cannot be imported ({error}). Type: {install}.") from error
