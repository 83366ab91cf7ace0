"""Every logger on two ranks: each row is written once, by rank 0."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.loggers.console import ConsoleLogger
from hocket.loggers.memory import MemoryLogger
from hocket_loggers.progress import ProgressLogger
from hocket_testkit.ranks import run_ranks


class Count(hocket.Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, state, metrics):
        self.rows.append(metrics["train/loss"])


class Mean(Count):
    """Asks the other ranks, which is what ``all_ranks`` is for."""

    all_ranks = True

    def log_metrics(self, state, metrics):
        self.rows.append(state.bus.all_reduce(torch.tensor(state.strategy.rank + 1.0), "sum").item())


def test_each_row_once(tmp_path):
    pytest.importorskip("tensorboard")

    def rank_main(rank):
        printed, shown, memory = io.StringIO(), io.StringIO(), MemoryLogger()
        count, mean = Count(), Mean()
        batches = [(torch.full((4, 3), float(number)), torch.zeros(4, 1)) for number in range(4)]
        trainer = hocket.Trainer(
            model=nn.Linear(3, 1), loss=F.mse_loss, train_data=batches, optimizer="sgd(lr=0.001)", duration="1ep",
            log_every="1ba", strategy={"ddp": {"split_data": False}}, device="cpu", run_name="run", folder=tmp_path,
            loggers=[ConsoleLogger(printed), ProgressLogger(shown, seconds=0.0), memory, "jsonl", "tensorboard", count, mean],
        )  # fmt: skip
        trainer.fit()
        trainer.close()
        lines = [len(re.findall(r"train/loss", text.getvalue())) for text in (printed, shown)]
        return lines, len(memory.metrics.get("train/loss", ())), len(count.rows), mean.rows

    (lines, *written, asked), *others = run_ranks(rank_main, 2)
    assert lines == [4, 4] and written == [4, 4] and asked == [3.0] * 4
    assert others == [([0, 0], 0, 0, [3.0] * 4)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("batch") for row in rows] == [None, 1, 2, 3, 4]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
