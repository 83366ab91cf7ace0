"""Norms with running statistics, such as BatchNorm, whose parameters are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def norms_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules with running statistics by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            yield name, module


def said(number: int, batch_norm: str) -> str:
    """Return what becomes of this many frozen norms, for the end of a sentence; nothing of none."""
    does = "keep" if batch_norm == "eval" else "update"
    if number == 1:
        return f"; 1 norm of a frozen part {does}s its running statistics"
    return f"; {number} norms of frozen parts {does} their running statistics" if number else ""
