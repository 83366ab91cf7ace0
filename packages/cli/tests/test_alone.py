"""The command line needs nothing but core and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket_cli import main

CONFIGURATION = """
model: {torch.nn:Linear: {in_features: 4, out_features: 3}}
train_data: {alone_data:data: {}}
loss: cross_entropy
optimizer: adamw(lr=0.01)
duration: 4ep
device: cpu
seed: 1
checkpoints: runs/a
resume: auto
"""
DATA = """
import torch


def data():
    return [(torch.ones(8, 4), torch.arange(8) % 3)] * 5
"""


def test_alone_it_plans_trains_and_lists(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("alone_data.py").write_text(DATA)
    Path("run.yaml").write_text(CONFIGURATION)
    assert main(["plan", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "duration=2ep"]) == 0
    assert main(["train", "run.yaml"]) == 0
    assert main(["runs", "runs"]) == 0
    assert main(["checkpoint", "inspect", "runs/a/ep4-ba20"]) == 0
    printed = capfd.readouterr()
    assert "resumed from runs/a/ep2-ba10" in printed.out + printed.err
