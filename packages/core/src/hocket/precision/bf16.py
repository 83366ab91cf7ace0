"""bfloat16 autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hocket.precision.base import Precision


class BF16(Precision):
    """Forward and loss under bfloat16 autocast; weights, gradients and optimizer state stay in 32 bits.

    bfloat16 has the range of float32, so the loss needs no scaling (Kalamkar et al. 2019, arXiv 1905.12322).
    """

    compute_dtype = torch.bfloat16

    def __init__(self) -> None:
        self._device_type = "cpu"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remembers the device that autocast is for; the weights stay as they are."""
        parameter = next(module.parameters(), None)
        if parameter is not None:
            self._device_type = parameter.device.type
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16."""
        return torch.autocast(self._device_type, dtype=torch.bfloat16)
