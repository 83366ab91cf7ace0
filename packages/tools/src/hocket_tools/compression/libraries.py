"""Import the libraries that compress, and say what to install if one is missing."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from hocket.errors import MissingPackage
from hocket.help import installing


def torchao(module: str) -> Any:
    """Return a module of torchao, such as ``"quantization"``, without its lines about extensions that it does not have.

    Raises:
        hocket.errors.MissingPackage: torchao is not installed, or has no such module in this version.
    """
    logger = logging.getLogger("torch.utils._pytree")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(f"torchao.{module}")
    except ModuleNotFoundError as error:
        raise _missing(f"torchao.{module}", "torchao", error) from error
    finally:
        logger.setLevel(before)


def torch_pruning() -> Any:
    """Return torch-pruning (Fang et al. 2023, arXiv 2301.12900).

    Raises:
        hocket.errors.MissingPackage: it is not installed.
    """
    try:
        return importlib.import_module("torch_pruning")
    except ModuleNotFoundError as error:
        raise _missing("torch_pruning", "pruning", error) from error


def _missing(module: str, extra: str, error: ModuleNotFoundError) -> MissingPackage:
    return MissingPackage(
        f"{module} is needed here and cannot be imported ({error}). Type: {installing.command(extra, 'hocket-tools')}."
    )
