"""Composer's precisions, and those of hocket's that they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch

from hocket.errors import WrongValue


class Precision(StrEnum):
    """The precisions of Composer's Trainer."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    @property
    def plugin(self) -> str:
        """The name of hocket's precision."""
        return self.value.removeprefix("amp_")


@contextmanager
def get_precision_context(precision: str | Precision) -> Iterator[None]:
    """Compute in a precision inside the context, on a GPU; a CPU computes as ever. Raises ValueError for ``amp_fp8``."""
    precision = Precision(precision)
    if precision is Precision.AMP_FP8:
        raise WrongValue("get_precision_context('amp_fp8') is not available. Write Trainer(precision='amp_fp8').")
    if not torch.cuda.is_available():
        yield
        return
    dtype = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}.get(precision)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        yield
