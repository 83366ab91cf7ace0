"""bfloat16 autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hocket.precision.base import Precision


class BF16(Precision):
    """Compute forward and loss under bfloat16 autocast. Weights, gradients and optimizer state stay in 32 bits.

    bfloat16 has the range of float32, so the loss needs no scaling (Kalamkar et al. 2019, arXiv 1905.12322).

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="bf16", device="cpu")
        >>> trainer.predict([torch.randn(8, 4)])[0].dtype, trainer.model_state_dict()["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    compute_dtype = torch.bfloat16

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast to bfloat16."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
