"""A logger that keeps all values in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.hookspecs.logger import Logger
from hocket.state.state import State


class MemoryLogger(Logger):
    """Keep all logged values in memory, for notebooks and tests.

    Pass an instance, to read from it later. Metrics alone need no logger: `hocket.Result.history` has them.

    Attributes:
        metrics: a list of ``(batch, value)`` by name.
        hyperparameters: the logged hyperparameters.
        images, tables, texts, histograms, artifacts: lists of the logged objects by name.

    Example:
        >>> import hocket, torch
        >>> from hocket.loggers.memory import MemoryLogger
        >>> logger = MemoryLogger()
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=[logger],
        ... )
        >>> result = trainer.fit()
        >>> [batch for batch, loss in logger.metrics["train/loss"]]
        [10, 20]
    """

    synchronous = True  # values can be read immediately

    def __init__(self) -> None:
        self.metrics: dict[str, list[tuple[int, float]]] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.images: dict[str, list[Sequence[Any]]] = {}
        self.tables: dict[str, list[tuple[list[str], list[list[Any]]]]] = {}
        self.texts: dict[str, list[str]] = {}
        self.histograms: dict[str, list[tuple[list[float], list[float]]]] = {}
        self.artifacts: dict[str, list[Path]] = {}

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Store in ``hyperparameters``."""
        self.hyperparameters.update(parameters)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Store in ``metrics``."""
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append((state.timestamp.batch, value))

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Store in ``images``."""
        self.images.setdefault(name, []).append(list(images))

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Store in ``tables``, as ``(columns, rows)``."""
        self.tables.setdefault(name, []).append((list(columns), [list(row) for row in rows]))

    def log_text(self, state: State, name: str, text: str) -> None:
        """Store in ``texts``."""
        self.texts.setdefault(name, []).append(text)

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Store in ``histograms``, as ``(counts, edges)``."""
        self.histograms.setdefault(name, []).append((list(counts), list(edges)))

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Store in ``artifacts``."""
        self.artifacts.setdefault(name, []).append(Path(path))
