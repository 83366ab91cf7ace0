"""Distributed strategies, what starts processes, and further precisions. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_strategies.ddp import DDP as DDP
    from hocket_strategies.deepspeed import DeepSpeed as DeepSpeed
    from hocket_strategies.fsdp import FSDP as FSDP
    from hocket_strategies.local_sgd import LocalSGD as LocalSGD
    from hocket_strategies.precisions.fp8 import FP8 as FP8
    from hocket_strategies.precisions.fp16 import FP16 as FP16
    from hocket_strategies.precisions.fp64 import FP64 as FP64
    from hocket_strategies.precisions.int8 import INT8 as INT8
    from hocket_strategies.precisions.tf32 import TF32 as TF32
    from hocket_strategies.precisions.true_half import BF16True as BF16True, FP16True as FP16True
    from hocket_strategies.ray import Ray as Ray
    from hocket_strategies.tensor_parallel import TensorParallel as TensorParallel

__getattr__, __dir__ = lazy(__name__)
