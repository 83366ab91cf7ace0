"""Where it is written down. Every attached logger is told. Subclass :class:`hocket.Logger`.

Values arrive as plain numbers: what was logged as a tensor stays on its device until a logging interval ends and then
comes over in one packed transfer. Only rank 0 is told, unless the logger sets ``all_ranks = True``; a logger that raises or is
slow disturbs nobody (`hocket.plugins.delivery`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from hocket.state import State


class Loggers:
    """Everything that can be written down. ``state.timestamp`` says when it was."""

    @hookspec
    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any], /) -> None:
        """What the run was configured with; once, at its first fit. Values are JSON-like."""

    @hookspec
    def log_metrics(self, state: State, metrics: Mapping[str, float], /) -> None:
        """Numbers by name, such as ``train/loss``, ``test/accuracy`` or ``lr/group0``."""

    @hookspec
    def log_images(self, state: State, name: str, images: Sequence[Any], /) -> None:
        """Images as uint8 or float tensors (C, H, W) on the CPU, floats in [0, 1]."""

    @hookspec
    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], /) -> None:
        """A table of JSON-like cells."""

    @hookspec
    def log_artifact(self, state: State, name: str, path: Path, /) -> None:
        """A finished file or folder worth keeping."""

    @hookspec
    def flush(self, state: State, /) -> None:
        """Write out what is buffered."""
