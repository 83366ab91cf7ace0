"""Experiment loggers. Names are imported when they are first used, and a logger's library when the logger is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket_loggers.tensorboard import TensorBoardLogger

#: Public name -> the module that defines it.
_PUBLIC = {"TensorBoardLogger": "hocket_loggers.tensorboard"}

__all__ = ["TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hocket_loggers' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
