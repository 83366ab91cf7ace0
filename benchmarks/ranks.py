"""A step on two gloo ranks under ``ddp`` against one with a hand-written DistributedDataParallel (7)."""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from harness import Series, table
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from workload import GPT, next_token_loss

import hocket
from hocket.testkit import run_ranks

STEPS, BATCH = 10, 8


class Clock(hocket.Callback):
    """When steps began; the first is left out, because it sets things up."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def before_dataloader(self, state: hocket.State) -> None:
        """A step begins."""
        self.times.append(time.perf_counter())


def run(repeats: int) -> dict[str, Any]:
    """Seconds per step of both, one right after the other, on rank 0."""
    pairs = run_ranks(lambda rank: [_once(rank) for _ in range(repeats + 1)], 2, timeout=600.0)[0][1:]
    own, raw = Series([a * 1e3 for a, _ in pairs]), Series([b * 1e3 for _, b in pairs])
    ratio = Series([a / b for a, b in pairs])
    rows = [
        ["4-layer GPT, 2 ranks × 4 × 128, gloo", "hocket ÷ hand-written", "hocket, ms", "hand-written, ms"],
        ["ddp", str(ratio), str(own), str(raw)],
    ]
    return {"ratio": ratio.values, "own_ms": own.values, "raw_ms": raw.values, "table": table(rows)}


def _once(rank: int) -> tuple[float, float]:
    torch.manual_seed(0)
    samples = TensorDataset(torch.randint(256, (STEPS * BATCH, 128)), torch.randint(256, (STEPS * BATCH, 128)))
    own = _hocket(samples)
    return own, _raw(samples)


def _hocket(samples: Dataset[Any]) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = hocket.Trainer(
            model=GPT(), loss=next_token_loss, train_data=DataLoader(samples), global_batch=BATCH, duration="1ep",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), folder=folder, run_name="ranks", device="cpu",
            strategy="ddp", callbacks=[clock],
        )  # fmt: skip
        trainer.fit()
    return _median(clock.times)


def _raw(samples: Dataset[Any]) -> float:
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: Any = DistributedSampler(samples, shuffle=False)  # type: ignore[arg-type]  # a TensorDataset has a length
    times = [time.perf_counter()]
    for inputs, targets in DataLoader(samples, BATCH // 2, sampler=sampler):
        optimizer.zero_grad()
        next_token_loss(model(inputs), targets).backward()
        optimizer.step()
        times.append(time.perf_counter())
    return _median(times)


def _median(times: list[float]) -> float:
    return statistics.median(b - a for a, b in list(pairwise(times))[1:])


if __name__ == "__main__":
    print(run(5)["table"])
