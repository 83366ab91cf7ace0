"""Checkpoints need nothing but core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.checkpoints import read_weights


def weights(folder: Path, duration: str, **arguments: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    trainer = hocket.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), DataLoader(data, 4, shuffle=True),
        loss="cross_entropy", optimizer="adamw(lr=0.01)", device="cpu", seed=1, duration=duration,
        checkpoints=hocket.Checkpoints(folder, every="2ba"), **arguments,
    )  # fmt: skip
    trainer.fit()
    return trainer.model_state_dict()


def test_alone_a_run_resumes_within_an_epoch(tmp_path: Path) -> None:
    expected = weights(tmp_path / "whole", "3ep")
    saved = weights(tmp_path / "parts", "8ba")
    assert same(read_weights(tmp_path / "parts" / "ep1-ba8"), saved)
    assert same(weights(tmp_path / "parts", "3ep", resume="auto"), expected)
