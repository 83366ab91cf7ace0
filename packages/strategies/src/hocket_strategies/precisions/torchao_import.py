"""Import torchao, which the 8-bit precisions need."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hocket.errors import MissingPackage
from hocket.help import installing


def torchao(module: str) -> Any:
    """Return the module ``torchao.<module>``. Raises ImportError saying how to install it."""
    try:
        return importlib.import_module(f"torchao.{module}")
    except ImportError as error:
        raise MissingPackage(
            f"This precision needs torchao, which cannot be imported here ({error}). Type: "
            f"{installing.command('torchao', 'hocket-strategies')}; if it is installed, take the "
            f"release of torchao that was made for this torch ({torch.__version__})."
        ) from error
