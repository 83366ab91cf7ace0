"""A step on two gloo ranks under ``ddp`` against one with a hand-written DistributedDataParallel (7)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from harness import Series, table
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from workload import GPT, next_token_loss

import hocket
from hocket_testkit import run_ranks

BATCH = 8


class Alternately(hocket.Callback):
    """Takes a hand-written step before each of the Trainer's, and the times of both.

    What else the machine does changes from second to second, by more than what is looked for here.
    """

    def __init__(self, raw: Iterator[None]) -> None:
        self._raw = raw
        self._began: float | None = None
        self.times: list[tuple[float, float]] = []

    def before_dataloader(self, state: hocket.State) -> None:
        """A step of the Trainer's begins."""
        own = time.perf_counter()
        next(self._raw)
        raw = time.perf_counter()
        if self._began is not None:
            self.times.append((own - self._began, raw - own))
        self._began = time.perf_counter()


def run(steps: int) -> dict[str, Any]:
    """Seconds per step of both, on rank 0."""
    pairs = run_ranks(lambda rank: _both(steps + 1), 2, timeout=600.0)[0][1:]
    own, raw = Series([a * 1e3 for a, _ in pairs]), Series([b * 1e3 for _, b in pairs])
    ratio = Series([a / b for a, b in pairs])
    rows = [
        ["4-layer GPT, 2 ranks × 4 × 128, gloo", "hocket ÷ hand-written", "hocket, ms", "hand-written, ms"],
        ["ddp", str(ratio), str(own), str(raw)],
    ]
    return {"ratio": ratio.values, "own_ms": own.values, "raw_ms": raw.values, "table": table(rows)}


def _both(steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    samples = TensorDataset(*torch.randint(256, (2, steps * BATCH, 128)))
    times = Alternately(_raw(samples))
    with tempfile.TemporaryDirectory() as folder:
        hocket.Trainer(
            model=GPT(), loss=next_token_loss, train_data=DataLoader(samples), global_batch=BATCH, duration="1ep",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), folder=folder, run_name="ranks", device="cpu",
            strategy="ddp", callbacks=[times],
        ).fit()  # fmt: skip
    return times.times


def _raw(samples: Dataset[Any]) -> Iterator[None]:
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: Any = DistributedSampler(samples, shuffle=False)  # type: ignore[arg-type]  # a TensorDataset has a length
    while True:
        for inputs, targets in DataLoader(samples, BATCH // 2, sampler=sampler):
            optimizer.zero_grad()
            next_token_loss(model(inputs), targets).backward()
            optimizer.step()
            yield


if __name__ == "__main__":
    print(run(60)["table"])
