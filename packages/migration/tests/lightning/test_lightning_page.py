"""The guides to Lightning projects run, and the numbers of docs/reference/drop-in-lightning.md are those of both Trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from pages import ROOT, blocks, write
from torch.utils.data import DataLoader

from hocket_migration.lightning import Trainer
from hocket_testkit import run_ranks


def test_the_programs_of_the_guides_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/from-lightning.md is the file that the others, docs/how-to/lightning-*.md, import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for guide in ("from-lightning", "lightning-plugins", "lightning-checkpoints"):
        page, names = ROOT / f"docs/how-to/{guide}.md", {"__name__": "__main__"}
        (block,) = blocks(page)
        if "file" in block.words:
            write(block, tmp_path)
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    assert names["continued"].global_step == 24  # type: ignore[attr-defined]


class Weight(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * batch.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch.mean(), sync_dist=True)
        self.log("of this rank", batch.mean())
        self.log("count", float(len(batch)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_the_last_accumulation_window_counts_whole() -> None:
    def weight(trainer_class: Any) -> float:
        module = Weight()
        trainer = trainer_class(**m.arguments(max_epochs=1, accumulate_grad_batches=4))
        trainer.fit(module, DataLoader(torch.ones(5), 1))
        return module.weight.item()

    assert (weight(pl.Trainer), weight(Trainer)) == (-1.25, -2.0)


def test_uneven_evaluation_counts_each_sample_once() -> None:
    def validate(rank: int, trainer_class: Any, given: dict[str, Any]) -> dict[str, float]:
        loader = DataLoader(torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0]), 1)
        (values,) = trainer_class(**m.arguments(), **given).validate(Weight(), loader, verbose=False)
        return values

    theirs = run_ranks(validate, 2, pl.Trainer, {"strategy": "ddp", "devices": 2})
    ours = run_ranks(validate, 2, Trainer, {"hocket": {"strategy": "ddp"}})
    assert [(each["count"], round(each["mean"], 3)) for each in theirs] == [(6, 1.667)] * 2
    assert sorted(round(each["of this rank"], 3) for each in theirs) == [0.0, 3.333]
    assert ours == [{"mean": 2.0, "of this rank": 2.0, "count": 5.0}] * 2
