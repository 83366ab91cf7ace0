"""The differences between weights and the module that they are loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The misfits: names missing from the weights, names missing from the module, and names with different shapes.

    Example:
        >>> import torch
        >>> from hocket.checkpoints import load_weights
        >>> report = load_weights(torch.nn.Linear(2, 1), {"weight": torch.ones(1, 2)}, strict=False)
        >>> report.missing
        ('bias',)
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Name, shape in the weights, shape in the module."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"missing from the weights: {some(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the module: {some(self.unexpected)}")
        if self.mismatched:
            shapes = [f"{name} ({list(given)}, the module has {list(own)})" for name, given, own in self.mismatched]
            lines.append(f"of another shape: {some(shapes)}")
        return "\n".join(lines) or "everything fits"


def some(names: Sequence[str], most: int = 20) -> str:
    """List the first names, and say how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of all tensors by name."""
    return {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}


def listed(paths: list[str], most: int = 6) -> str:
    """Return the first paths as a Python list to type."""
    shown = [f"'{path}'" for path in paths[:most]]
    return f"[{', '.join([*shown, '…'] if len(paths) > most else shown)}]"
