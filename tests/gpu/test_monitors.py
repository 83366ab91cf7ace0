"""Monitors that ask CUDA or its driver: snapshots of memory, NVML, and statistics that nothing waits for."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.loggers.memory import MemoryLogger
from hocket_insight.callbacks import nvml


def fit(*callbacks: Any, model: nn.Module | None = None, batches: int = 8, **changes: Any) -> MemoryLogger:
    logger = MemoryLogger()
    data = [(torch.randn(16, 64), torch.randn(16, 64)) for _ in range(batches)]
    arguments = {
        "loss": F.mse_loss,
        "optimizer": "adamw(lr=1e-3)",
        "train_data": data,
        "duration": "1ep",
        "log_every": "4ba",
    }
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) if model is None else model
    with hocket.Trainer(
        model=model, callbacks=list(callbacks), loggers=[logger], **{**arguments, **changes}
    ) as trainer:  # fmt: skip
        trainer.fit()
    return logger


class Huge(nn.Linear):
    """Needs 4 EB in its second forward pass."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            torch.empty(2**60, device=x.device)
        return super().forward(x)


@pytest.mark.parametrize("record", [False, True], ids=["blocks", "with history"])
def test_a_snapshot_when_memory_runs_out(cuda: torch.device, tmp_path: Path, record: bool) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(
            {"memory-report": {"record": record}}, model=Huge(64, 64), device="cuda", folder=str(tmp_path), run_name="a"
        )
    assert "out-of-memory-rank0.txt" in "".join(raised.value.__notes__)
    text = (tmp_path / "a" / "out-of-memory-rank0.txt").read_text()
    assert "16.38 KB" in text, "64 × 64 weights"
    assert "reserved by torch" in text
    snapshot = pickle.loads((tmp_path / "a" / "out-of-memory-rank0.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(snapshot["device_traces"]) is record


def test_nvml_knows_the_gpu_of_torch(cuda: torch.device) -> None:
    pytest.importorskip("pynvml")
    pytest.importorskip("psutil")

    class Work(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            a = torch.randn(4096, 4096, device="cuda")
            for _ in range(50):
                a = (a @ a).clamp(-1, 1)
            torch.cuda.synchronize()
            time.sleep(0.05)

    logger = fit(
        {"system-monitor": {"every": "8ba", "seconds": 0.05}}, {"energy-monitor": {"every": "8ba", "seconds": 0.05}}, Work(),
        device="cuda",
    )  # fmt: skip
    last = {name: values[-1][1] for name, values in logger.metrics.items()}
    assert 0 < last["system/gpu0_percent_max"] <= 100
    free, total = torch.cuda.mem_get_info()
    assert last["system/gpu0_memory_max"] == pytest.approx(total - free, rel=0.2, abs=1e9)
    assert 10 < last["system/gpu0_temperature"] < 110
    assert 20 < last["system/gpu0_power"] < 1500
    assert last["energy/gpu_joules"] > 0
    (gpu, *_) = nvml.gpus()
    assert gpu.counts_energy == (torch.cuda.get_device_capability() >= (7, 0))


def test_statistics_are_those_of_the_cpu(device: str) -> None:
    monitors = [
        {"gradient-monitor": {"every": 4, "histograms": True}}, {"activation-monitor": {"every": 4, "histograms": True}}
    ]  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    torch.manual_seed(1)
    here = fit(*monitors, model=model, device=device, seed=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    torch.manual_seed(1)
    there = fit(*monitors, model=model, device="cpu", seed=3)
    for name, values in there.metrics.items():
        if name.startswith(("gradient/", "activation/")):
            assert [v for _, v in here.metrics[name]] == pytest.approx([v for _, v in values], rel=0.01, abs=0.01), name
    assert here.histograms.keys() == there.histograms.keys()
