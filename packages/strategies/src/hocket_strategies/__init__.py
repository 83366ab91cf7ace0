"""Distributed strategies and further precisions. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket_strategies.ddp import DDP
    from hocket_strategies.deepspeed import DeepSpeed
    from hocket_strategies.fsdp import FSDP
    from hocket_strategies.local_sgd import LocalSGD
    from hocket_strategies.precisions.fp8 import FP8
    from hocket_strategies.precisions.fp16 import FP16
    from hocket_strategies.precisions.fp64 import FP64
    from hocket_strategies.precisions.int8 import INT8
    from hocket_strategies.precisions.tf32 import TF32
    from hocket_strategies.precisions.true_half import BF16True, FP16True
    from hocket_strategies.ray import Ray
    from hocket_strategies.tensor_parallel import TensorParallel

#: Public name -> the module that defines it.
_PUBLIC = {
    "DDP": "hocket_strategies.ddp",
    "BF16True": "hocket_strategies.precisions.true_half",
    "FP16": "hocket_strategies.precisions.fp16",
    "FP16True": "hocket_strategies.precisions.true_half",
    "DeepSpeed": "hocket_strategies.deepspeed",
    "LocalSGD": "hocket_strategies.local_sgd",
    "Ray": "hocket_strategies.ray",
    "FP64": "hocket_strategies.precisions.fp64",
    "FP8": "hocket_strategies.precisions.fp8",
    "FSDP": "hocket_strategies.fsdp",
    "INT8": "hocket_strategies.precisions.int8",
    "TF32": "hocket_strategies.precisions.tf32",
    "TensorParallel": "hocket_strategies.tensor_parallel",
}

__all__ = [
    "DDP",
    "FP8",
    "FP16",
    "FP64",
    "FSDP",
    "INT8",
    "TF32",
    "BF16True",
    "DeepSpeed",
    "FP16True",
    "LocalSGD",
    "Ray",
    "TensorParallel",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hocket_strategies' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
