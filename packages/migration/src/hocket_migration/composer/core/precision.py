"""Composer's precisions, and those of hocket's that they are."""

from __future__ import annotations

from enum import StrEnum


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
