"""The programs of the methods' cards in docs/algorithms run, by name in a Trainer and by function, on a small model."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

import hocket

sys.path.append(str(Path(__file__).parent / "matrix"))

import runs
from pages import ROOT, blocks

CARDS = ROOT / "docs/algorithms"


def given(name: str) -> dict[str, Any]:
    """The names that a card supposes: a model and its optimizer, a batch, and where training is."""
    arguments = runs._texts(True, name in runs.ROTARY) if runs.is_text(name) else runs._images(True)
    model, batch = arguments["model"], next(iter(arguments["train_data"]))
    shared = {"hocket": hocket, "model": model, "batch": batch, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    shared |= {"step": 1, "warmup_steps": 4, "total_steps": 2, "epoch": 0, "indices": torch.arange(runs.BATCH)}
    shared |= {"loss_fn": cross_entropy, "cross_entropy": cross_entropy, "DataLoader": DataLoader}
    if runs.is_text(name):
        hidden, head = torch.rand(runs.BATCH, 8, 16), torch.nn.Linear(16, 32)
        texts = {"texts": arguments["train_data"].dataset, "collate": default_collate, "hidden": hidden, "head": head}
        return shared | texts | batch
    images, labels = batch
    model.layers = torch.nn.Sequential(*(runs.Block(16, torch.nn.BatchNorm2d) for _ in range(2)))
    logits = model(images)
    logits.sum().backward(retain_graph=True)
    pictures = {"images": images, "inputs": images, "labels": labels, "targets": labels, "logits": logits}
    return shared | pictures | {"teacher": runs.Network(True).eval(), "MyLargeModel": lambda: runs.Network(True)}


@pytest.mark.parametrize("name", runs.NAMES)
def test_card_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/teacher").mkdir(parents=True)
    torch.save(runs.Network(True).state_dict(), "runs/teacher/latest")
    original, trainers = hocket.Trainer, []

    def build(rest: object, **arguments: Any) -> None:
        """The Trainer of ``hocket.Trainer(..., algorithms=[…])``, on data for the algorithm, as far as its plan."""
        assert rest is ...
        with monkeypatch.context() as context:
            context.setattr(hocket, "Trainer", original)
            with runs.make(name, folder=tmp_path, **arguments) as trainer:
                trainers.append(trainer.plan())

    monkeypatch.setattr(hocket, "Trainer", build)
    programs = [block for block in blocks(CARDS / f"{name}.md") if block.language == "python"]
    for block in programs:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # some settings have no effect on so small a model
            exec(compile("\n" * (block.line - 1) + block.text, f"{name}.md", "exec"), given(name))
    assert len(programs) >= 2 and trainers
