"""hocket: with nothing attached, and with what people attach."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
from workload import Stopwatch, Workload

import hocket

DISTRIBUTIONS = ("hocket",)


class Noop(hocket.Callback):
    """Listens to one event and does nothing."""

    def batch_end(self, state: hocket.State) -> None:
        """Nothing."""


def fit(workload: Workload, data: Stopwatch, **arguments: Any) -> None:
    """One epoch."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = hocket.Trainer(
            model=workload.model(),
            loss=workload.loss,
            train_data=data,
            optimizer=workload.optimizer,
            duration="1ep",
            folder=folder,
            device=workload.device,
            precision=workload.precision,
            **arguments,
        )
        with trainer:
            trainer.fit()


MONITORS = {
    "callbacks": ["lr-monitor", "speed-monitor"],
    "algorithms": ["ema", {"gradient-clipping": {"kind": "norm", "threshold": 1.0}}],
}
EVERYTHING = [
    "lr-monitor", "speed-monitor", "memory-monitor", "nan-monitor", "optimizer-monitor", "runtime-estimator",
    "gradient-monitor", "activation-monitor", "memory-report", "system-monitor", "energy-monitor", "time-monitor", "heartbeat",
    {"threshold-stopper": {"monitor": "train/loss", "above": 1e9}}, {"sample-visualizer": {"on": "train"}},
]  # fmt: skip

#: Case -> (what runs it, microbatches of the hand-written loop beside it).
CASES = {
    "bare": (fit, 1),
    "progress + jsonl": (partial(fit, loggers=["progress", "jsonl"]), 1),
    "lr-monitor + speed-monitor + EMA + clipping": (partial(fit, **MONITORS), 1),
    "10 no-op callbacks": (partial(fit, callbacks=[Noop] * 10), 1),
    "4 microbatches": (partial(fit, microbatch=4), 4),
    "every built-in callback, progress + jsonl": (partial(fit, callbacks=EVERYTHING, loggers=["progress", "jsonl"]), 1),
}
