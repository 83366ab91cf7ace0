"""The monitor: the suite for callbacks, and the bytes of a store that a server counts."""

from __future__ import annotations

from pathlib import Path

import data_sets
import pytest
import torch
from stand_in import StandIn

import hocket
import hocket.testkit
import hocket_streaming
from hocket.loggers.memory import MemoryLogger
from hocket_streaming import StreamMonitor


@pytest.mark.long
class TestStreamMonitor(hocket.testkit.CallbackConformance):
    def make(self) -> StreamMonitor:
        return StreamMonitor(every="1ba")


def tensors(sample: dict[str, int]) -> torch.Tensor:
    return torch.tensor([float(sample["number"])])


def test_bytes_are_those_that_the_server_sent(tmp_path: Path) -> None:
    path, _ = data_sets.write("mds", tmp_path / "data")
    server = StandIn()
    try:
        for file in Path(path).iterdir():
            server.files[f"bucket/data/{file.name}"] = file.read_bytes()
        loader = hocket_streaming.stream(
            "s3://bucket/data", transform=tensors, num_workers=2, cache=str(tmp_path / "cache"),
            storage_options=server.options(),
        )  # fmt: skip
        logger = MemoryLogger()
        hocket.Trainer(
            model=torch.nn.Linear(1, 1), loss=lambda outputs, batch: outputs.square().mean(), optimizer="sgd(lr=0)",
            train_data=loader, global_batch=16, duration="1ep", callbacks=["stream-monitor"], loggers=[logger], device="cpu",
        ).fit()  # fmt: skip
    finally:
        server.close()
    sent = [entry for entry in server.log if entry[0] == "GET" and entry[1].endswith(".mds")]
    metrics = {name: values[-1][1] for name, values in logger.metrics.items()}
    assert (metrics["stream/bytes"], metrics["stream/chunks"]) == (sum(entry[3] for entry in sent), len(sent))
    assert metrics["stream/cache_bytes"] >= metrics["stream/bytes"] and metrics["stream/skipped"] == 0
    assert 0 <= metrics["stream/waited"] <= 1 and metrics["stream/bytes_per_second"] > 0
