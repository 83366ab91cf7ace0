"""Logging of the time that training waits for data, evaluations and checkpoints."""

from __future__ import annotations

import time
from typing import Any

from hocket.state.periodic import Periodic
from hocket.state.state import State


class TimeMonitor(Periodic):
    """Log how long the loop waited for data, evaluated, and was held up by checkpoints, since the last report.

    ``time/data_seconds`` is the mean wait per batch; ``time/evaluation_seconds`` and ``time/checkpoint_seconds`` are sums.
    ``time/data_share``, ``time/evaluation_share`` and ``time/checkpoint_share`` are fractions of the time since the last
    report. They are measured by this rank's host and add no wait for the device: a fast enough loader is not waited for,
    even if the device is busy. Checkpoints that are written in a thread count as far as training waits for them.

    Args:
        every: how often to log; the end of a fit logs too.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.time_monitor import TimeMonitor
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 10, callbacks=[TimeMonitor()],
        ... )
        >>> result = trainer.fit("1ep")
        >>> 0 <= result.history["time/data_share"][0] <= 1
        True
    """

    def __init__(self, every: str = "50ba") -> None:
        super().__init__(every)
        self._since = self._began = 0.0
        self._data = self._evaluation = self._checkpoints = 0.0
        self._batches = 0
        self._writers: list[Any] = []

    def fit_start(self, state: State) -> None:
        """Restart the measurement."""
        super().fit_start(state)
        self._writers = [each.obj for each in state.bus.attachments if hasattr(each.obj, "blocked_seconds")]
        self._restart(state)

    def _restart(self, state: State) -> None:
        self._since = time.perf_counter()
        self._data = self._evaluation = 0.0
        self._batches = state.timestamp.batch
        self._checkpoints = self._written()

    def _written(self) -> float:
        return sum(each.blocked_seconds for each in self._writers)

    def before_dataloader(self, state: State) -> None:
        """Start timing the data loader."""
        self._began = time.perf_counter()

    def after_dataloader(self, state: State) -> None:
        """Add the time of the data loader."""
        self._data += time.perf_counter() - self._began

    def eval_before_all(self, state: State) -> None:
        """Start timing the evaluation."""
        self._began = time.perf_counter()

    def eval_after_all(self, state: State) -> None:
        """Add the time of the evaluation."""
        self._evaluation += time.perf_counter() - self._began

    def _report(self, state: State) -> None:
        seconds = time.perf_counter() - self._since
        batches = state.timestamp.batch - self._batches
        spent = {
            "data": self._data,
            "evaluation": self._evaluation,
            "checkpoint": self._written() - self._checkpoints,
        }
        self._restart(state)
        if seconds > 0 and batches:
            state.log({f"time/{name}_share": part / seconds for name, part in spent.items()})
            spent["data"] /= batches
            state.log({f"time/{name}_seconds": part for name, part in spent.items()})
