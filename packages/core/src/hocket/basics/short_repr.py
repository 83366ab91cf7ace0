"""Show any value in a line."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def short(value: object) -> str:
    """Return a value as text of one short line."""
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{getattr(value, '__qualname__', value)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module) or type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}(…)"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"{type(value).__name__}(…)"
