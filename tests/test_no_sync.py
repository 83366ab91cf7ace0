"""Between logging intervals nobody makes the host wait for the device: neither the loop nor any built-in plug-in."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

import hocket
from hocket_testkit import no_sync
from hocket_testkit.sync import SynchronisationError

BATCHES, EVERY = 12, 4
CALLBACKS = [
    "lr-monitor", "speed-monitor", "memory-monitor", "runtime-estimator",
    {"nan-monitor": {"every": EVERY}}, {"optimizer-monitor": {"every": EVERY}},
]  # fmt: skip
MONITORS = [
    {"gradient-monitor": {"every": 1, "histograms": True}}, {"activation-monitor": {"every": 1, "histograms": True}},
    {"memory-report": {"at": 100}}, {"system-monitor": {"every": "1ba", "seconds": 0.01}}, {"time-monitor": {"every": "1ba"}},
    {"heartbeat": {"seconds": 0.01}}, {"threshold-stopper": {"monitor": "train/loss", "above": 1e9}},
    {"sample-visualizer": {"on": "train", "every": 1}}, {"energy-monitor": {"every": "1ba"}},
]  # fmt: skip
ALGORITHMS = [
    "label-smoothing", "sam", {"ema": {"half_life": "2ba"}}, {"gradient-clipping": {"kind": "norm", "threshold": 1.0}},
]  # fmt: skip


class Ahead(hocket.Device):
    """The CPU as if it computed while the host goes on; `no_sync` takes its tensors for those of a device."""

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


class Watch(hocket.Callback):
    """Refuses to wait, except in the batch that ends with the loggers."""

    def __init__(self) -> None:
        self.batches = 0
        self._guard = ExitStack()

    def before_dataloader(self, state: hocket.State) -> None:
        self._guard.close()
        # The first batch may set things up.
        if state.timestamp.batch and (state.timestamp.batch + 1) % EVERY and state.timestamp.batch < BATCHES:
            self.batches += 1
            self._guard.enter_context(no_sync(simulate=True))

    def epoch_end(self, state: hocket.State) -> None:
        self._guard.close()

    def close(self, state: hocket.State) -> None:
        self._guard.close()


def run(model: Any, data: Any, **changes: Any) -> Watch:
    watch = Watch()
    arguments = {
        "model": model, "loss": torch.nn.functional.cross_entropy, "train_data": data,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "schedule": "cosine",
        "duration": f"{BATCHES}ba", "device": Ahead(), "log_every": f"{EVERY}ba", "seed": 1,
    }  # fmt: skip
    changes["callbacks"] = [*changes.get("callbacks", ()), watch]
    trainer = hocket.Trainer(**{**arguments, **changes})
    with trainer:
        trainer.fit()
    return watch


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_gradients": 1.0, "nonfinite": "warn"},
        {"microbatch": 10},
        {"callbacks": CALLBACKS, "loggers": ["jsonl", "console", "memory"]},
        {"callbacks": MONITORS, "microbatch": 10},
        {"algorithms": ALGORITHMS},
        {"algorithms": ALGORITHMS, "callbacks": CALLBACKS, "loggers": ["jsonl", "tensorboard"], "microbatch": 16},
    ],
    ids=["bare", "clipping", "microbatches", "attachments", "monitors", "algorithms", "everything"],
)
@pytest.mark.filterwarnings("ignore:energy-monitor logs nothing")
def test_nobody_waits(model, data, changes: dict[str, Any]) -> None:
    assert run(model(), data(samples=BATCHES * 32), **changes).batches == 8


def test_who_waits_is_noticed(model, data) -> None:
    """Otherwise the test above could not fail."""

    class Waits(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            assert state.loss is not None
            float(state.loss)

    with pytest.raises(SynchronisationError, match="wait for the device"):
        run(model(), data(samples=BATCHES * 32), callbacks=[Waits()])
    with pytest.raises(SynchronisationError, match="wait for the device"):
        run(model(), data(samples=BATCHES * 32), nonfinite="skip")
