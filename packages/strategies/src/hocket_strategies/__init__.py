"""Distributed strategies and further precisions. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket_strategies.ddp import DDP
    from hocket_strategies.fsdp import FSDP
    from hocket_strategies.precisions.fp64 import FP64
    from hocket_strategies.tensor_parallel import TensorParallel

#: Public name -> the module that defines it.
_PUBLIC = {
    "DDP": "hocket_strategies.ddp",
    "FP64": "hocket_strategies.precisions.fp64",
    "FSDP": "hocket_strategies.fsdp",
    "TensorParallel": "hocket_strategies.tensor_parallel",
}

__all__ = ["DDP", "FP64", "FSDP", "TensorParallel"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hocket_strategies' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
