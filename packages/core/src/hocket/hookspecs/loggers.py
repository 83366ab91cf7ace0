"""Logger hooks. Every attached logger is called. Subclass :class:`hocket.Logger`.

Values arrive as plain numbers. A tensor that is logged stays on its device until the logging interval ends; then all
tensors are copied in one packed transfer. Loggers are called on rank 0 only, unless they set ``all_ranks = True``. A logger
that raises or is slow does not affect training (`hocket.plugins.delivery`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.markers import hooks

if TYPE_CHECKING:
    from hocket.state.state import State


@hooks()
class Loggers:
    """The hooks for values to log. ``state.timestamp`` is their position in training."""

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any], /) -> None:
        """Log the configuration of the run, before the first fit of a process. Values are JSON-like.

        A run that was resumed may have other values and other loggers than before.
        """

    def log_metrics(self, state: State, metrics: Mapping[str, float], /) -> None:
        """Log numbers by name, such as ``train/loss``, ``test/accuracy`` or ``lr/group0``."""

    def log_images(self, state: State, name: str, images: Sequence[Any], /) -> None:
        """Log images: uint8 or float tensors (C, H, W) on the CPU, floats in [0, 1]."""

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], /) -> None:
        """Log a table of JSON-like cells."""

    def log_text(self, state: State, name: str, text: str, /) -> None:
        """Log a text, which may be Markdown."""

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float], /) -> None:
        """Log a histogram: the number of values in each bin, and the n + 1 ascending edges of the n bins."""

    def log_artifact(self, state: State, name: str, path: Path, /) -> None:
        """Log a finished file or folder."""

    def log_summary(self, state: State, lines: Sequence[str], /) -> None:
        """Show the last lines of a fit, at most three: what it has written, and how to continue.

        Called after a fit, and after Control-C or SIGTERM has ended it, when files are closed. Before the first fit of a
        resumed run it is called with one line, which names the checkpoint.
        """

    def flush(self, state: State, /) -> None:
        """Write out buffered values. Called before a checkpoint is written, and after a fit."""
