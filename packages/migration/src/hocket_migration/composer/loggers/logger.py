"""Composer's logger: passes values to hocket's loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hocket import Timestamp as Position
from hocket.errors import WrongValue
from hocket_migration.composer.core.state import State


class Logger:
    """What algorithms and callbacks log with. Values go to all loggers of the Trainer, in hocket's intervals."""

    def __init__(self, state: State, destinations: Sequence[Any] = ()) -> None:
        self._state = state
        #: The loggers that the Trainer was given.
        self.destinations = list(destinations)
        #: The position of the run at which each value was logged last, by its name.
        self.positions: dict[str, Position] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name. The step is the number of batches trained on; raises ValueError for another one."""
        if step is not None and step != self._state.hocket.timestamp.batch:
            raise WrongValue(f"log_metrics(step={step}): hocket logs by the position of the run. Omit step=.")
        state = self._state.hocket
        self.positions.update(dict.fromkeys(metrics, state.timestamp.copy()))
        state.log(dict(metrics))

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log the configuration of the run."""
        state = self._state.hocket
        state.bus.log_hyperparameters(state, dict(parameters))

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", **_: Any) -> None:
        """Log a table."""
        state = self._state.hocket
        state.bus.log_table(state, name, list(columns), [list(row) for row in rows])

    def log_images(self, images: Any, name: str = "Images", channels_last: bool = False, **_: Any) -> None:
        """Log an image or several, as arrays or tensors."""
        state = self._state.hocket
        batch = images if isinstance(images, list | tuple) else [images]
        tensors = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each.detach().cpu() for each in batch]
        tensors = [image for each in tensors for image in (each if each.dim() == 4 else [each])]
        tensors = [
            each[None] if each.dim() == 2 else each.movedim(-1, 0) if channels_last else each for each in tensors
        ]
        state.bus.log_images(state, name, tensors)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log values that are not numbers, as texts."""
        state = self._state.hocket
        for name, value in traces.items():
            state.bus.log_text(state, name, str(value))

    def upload_file(self, remote_file_name: str, file_path: str | Path, *, overwrite: bool = False) -> None:
        """Log a finished file."""
        state = self._state.hocket
        state.bus.log_artifact(state, remote_file_name, Path(file_path))
