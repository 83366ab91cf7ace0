"""Composer's interface of loggers, and the adapter that runs them in hocket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hocket
from hocket_migration.composer.core import callback
from hocket_migration.composer.core.callback import Callback
from hocket_migration.composer.core.state import State


class LoggerDestination(Callback):
    """Base of custom loggers with Composer's interface. Values arrive by Composer's names, such as ``loss/train/total``.

    Example:
        >>> from hocket_migration.composer.loggers import LoggerDestination
        >>> class PrintLogger(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
    """

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log the configuration of the run."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log numbers by name; the step is the number of batches trained on."""

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table."""

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        """Log images."""

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log texts."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Store a file."""


def composers_names(metrics: Mapping[str, float], labels: Sequence[str]) -> dict[str, float]:
    """Return values by the names that Composer logs them by.

    Args:
        metrics: by hocket's names.
        labels: the evaluation sets.
    """
    named = {}
    for name, value in metrics.items():
        label, _, rest = name.partition("/")
        if name == "train/loss":
            name = "loss/train/total"
        elif name.startswith("train/loss/"):
            name = f"loss/{name.replace('/loss/', '/', 1)}"
        elif rest and (label == "train" or label in labels):
            name = f"metrics/{name}"
        named[name] = value
    return named


class _Adapter(hocket.Logger):
    """Run a logger with Composer's interface in a Trainer of hocket's."""

    synchronous = True  # values can be read immediately
    callback: LoggerDestination
    _view: State
    #: The batch after which train metrics were logged last.
    _measured_at = -1

    def log_hyperparameters(self, state: hocket.State, parameters: Mapping[str, Any]) -> None:
        self._view.bind(state)
        self.callback.log_hyperparameters(dict(parameters))

    def log_metrics(self, state: hocket.State, metrics: Mapping[str, float]) -> None:
        """Pass on the row of a batch: each value at the position at which Composer logs it, before or after the batch."""
        view = self._view.bind(state)
        logged = view.logger.positions
        parts = {f"train/{name}": f"train/loss/{name}" for name in state.loss_parts}
        metrics = {parts.get(name, name): value for name, value in metrics.items()}
        losses = {name for name in metrics if name == "train/loss" or name.startswith("train/loss/")}
        of_epoch = {name for name in metrics if name.startswith("train/")} - losses - logged.keys()
        if of_epoch and self._measured_at == state.timestamp.batch:  # hocket logs them at the end of a fit again
            metrics = {name: value for name, value in metrics.items() if name not in of_epoch}
        elif of_epoch:
            self._measured_at = state.timestamp.batch
        rows: dict[tuple[int, int], tuple[hocket.Timestamp, dict[str, float]]] = {}
        for name, value in metrics.items():
            at = state.previous if name in losses else logged.get(name, state.timestamp)
            rows.setdefault((at.batch, at.epoch), (at, {}))[1][name] = value
        for _, (at, row) in sorted(rows.items()):
            with view.at(at):
                self.callback.log_metrics(composers_names(row, list(state.eval_sets)), step=at.batch)

    def log_table(self, state: hocket.State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.callback.log_table(list(columns), [list(row) for row in rows], name, step=state.timestamp.batch)

    def log_images(self, state: hocket.State, name: str, images: Sequence[Any]) -> None:
        self.callback.log_images(list(images), name, step=state.timestamp.batch)

    def log_text(self, state: hocket.State, name: str, text: str) -> None:
        self.callback.log_traces({name: text})

    def log_artifact(self, state: hocket.State, name: str, path: Path) -> None:
        self.callback.upload_file(self._view.bind(state), name, path, overwrite=False)


def adapted(destination: LoggerDestination, view: State) -> Any:
    """Return a logger of hocket's that calls one with Composer's interface."""
    return callback.adapted(destination, view, _Adapter)
