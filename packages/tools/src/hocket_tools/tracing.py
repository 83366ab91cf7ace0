"""torch.export, after which this process can still be forked; and loggers that stay quiet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Drop lines of a logger below a level."""
    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)


def exported_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, strict: bool = False
) -> ExportedProgram:
    """Return ``torch.export.export(model, …)``.

    Its fake tensors register devices that are not there. If autograd began after that, it would start threads for them, and no
    forked process could compute gradients. So autograd begins first.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()
    return torch.export.export(model, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=strict)
