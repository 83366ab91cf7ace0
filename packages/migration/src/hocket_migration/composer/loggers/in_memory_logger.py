"""Composer's logger that keeps all values in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.errors import WrongValue
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Timestamp
from hocket_migration.composer.loggers.logger import Logger
from hocket_migration.composer.loggers.logger_destination import LoggerDestination


class InMemoryLogger(LoggerDestination):
    """Keep all logged values in memory, by Composer's names.

    Attributes:
        data: lists of ``(timestamp, value)`` by name.
        most_recent_values, most_recent_timestamps: the last of each name.
        hyperparameters: the configuration.
        tables: ``(columns, rows)`` by name.

    Example:
        >>> from hocket_migration.composer.loggers import InMemoryLogger
        >>> logger = InMemoryLogger()  # Trainer(loggers=[logger]); then logger.get_timeseries("loss/train/total")["batch"]
    """

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.most_recent_timestamps: dict[str, Timestamp] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, Any] = {}
        self.state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Keep the state, for timestamps."""
        self.state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values with the position of the run."""
        assert self.state is not None, "init comes first"
        now = self.state.timestamp
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((now, value))
            self.most_recent_values[name], self.most_recent_timestamps[name] = value, now

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Keep a table."""
        self.tables[name] = (columns, rows)

    def get_timeseries(self, metric: str) -> dict[str, Any]:
        """Return arrays of the values of a metric, under its name, and of the positions, by ``"batch"``, ``"epoch"`` …

        Raises ValueError for a name that was never logged.
        """
        if metric not in self.data:
            raise WrongValue(f"{metric!r} was not logged. These were: {', '.join(sorted(self.data)) or 'none'}.")
        entries = self.data[metric]
        found: dict[str, list[Any]] = {}
        for now, value in entries:
            for name, at in now.state_dict().items():
                found.setdefault(name, []).append(at.total_seconds() if name.endswith("_wct") else at)
            found.setdefault(metric, []).append(value)
        return {name: np.array(values) for name, values in found.items()}
