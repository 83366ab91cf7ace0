"""What the callback journal costs: CPU time of a step without and with it, and of each of its parts. ``python journal.py``."""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import nn

import hocket
from hocket_vision import digits, small_resnet

STEPS, WARM_UP, REPEATS = 220, 20, 3


class Clock(hocket.Callback):
    """Note the CPU time of this thread after each batch, which other processes do not disturb much."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def batch_end(self, state: hocket.State) -> None:
        self.times.append(time.thread_time())


def step(model: nn.Module, every: str | None, folder: str) -> float:
    """The mean of a step, in seconds."""
    clock = Clock()
    callbacks: list[Any] = [clock, *([{"journal": {"every": every}}] if every else [])]
    with hocket.Trainer(
        model=model, loss="cross_entropy", train_data=digits("train", batch_size=64), optimizer="adamw(lr=1e-3)",
        duration=f"{STEPS}ba", device="cpu", seed=1, callbacks=callbacks, folder=folder,
    ) as trainer:  # fmt: skip
        trainer.fit()
    return (clock.times[-1] - clock.times[WARM_UP]) / (STEPS - 1 - WARM_UP)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    models = {
        "64-128-10 MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        "small_resnet": small_resnet,
    }
    intervals = (None, "1000ba", "100ba", "1ba")
    print("| digits, batches of 64, 1 thread, ms per step | none | 1000ba | 100ba | 1ba |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in models.items():
            times: dict[str | None, list[float]] = {every: [] for every in intervals}
            for _ in range(REPEATS):
                for every in intervals:
                    torch.manual_seed(0)
                    times[every].append(step(make(), every, folder))
            print(f"| {name} | {' | '.join(f'{median(each) * 1e3:.3f}' for each in times.values())} |")


if __name__ == "__main__":
    main()
