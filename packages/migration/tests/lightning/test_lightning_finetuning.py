"""Projects with BaseFinetuning resume bitwise from hocket's checkpoints, with their callback, or `finetuning` in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import modules as m
import pytest
import torch
from lightning.pytorch import Trainer as theirs_trainer, callbacks as theirs
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from hocket_migration.lightning import Trainer


class Project(BoringModel):
    """The project of the report: a backbone that joins in epoch 1, beside a head with a schedule."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        if frozen:
            self.backbone[0].requires_grad_(False)

    def forward(self, inputs: Any) -> Any:
        return self.layer(self.backbone(inputs))

    def train_dataloader(self) -> Any:
        return DataLoader(list(torch.randn(12, 32, generator=torch.Generator().manual_seed(1))), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Unfreezes(theirs.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, 1e-3)


#: What `Unfreezes` does, in which batch norms train from the beginning.
STAGES = [{"at": "0ep", "train": ["layer.*", "backbone.1.*"]}, {"at": "1ep", "train": "backbone.0.*", "lr": 1e-3}]


def by_lightning(callback: Any) -> tuple[Any, Any]:
    """Return the weights and rates of a fit of Lightning's own Trainer."""
    torch.manual_seed(0)
    module = Project()
    trainer = theirs_trainer(**m.arguments(max_epochs=4, limit_val_batches=0, callbacks=[callback]))
    torch.manual_seed(1)
    trainer.fit(module)
    return module.state_dict(), [group["lr"] for group in trainer.optimizers[0].param_groups]


def trained(folder: Path, callbacks: Any = (), algorithms: Any = (), resume: Path | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Project(frozen=not callbacks)
    checkpoints = {"folder": str(folder), "every": "1ba", "keep": 100}
    more = {} if resume is None else {"resume": str(resume)}
    trainer = Trainer(
        **m.arguments(
            max_epochs=4, limit_val_batches=0, callbacks=list(callbacks),
            hocket={"checkpoints": checkpoints, "algorithms": list(algorithms), **more},
        )
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module)
    return module.state_dict(), [group["lr"] for group in trainer.optimizers[0].param_groups]


def finetuning() -> dict[str, Any]:
    pytest.importorskip("hocket_tools")
    return {"algorithms": [{"finetuning": {"stages": STAGES}}]}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "BaseFinetuning": lambda: {"callbacks": [Unfreezes()]},
    "BackboneFinetuning": lambda: {
        "callbacks": [theirs.BackboneFinetuning(1, backbone_initial_lr=1e-3, lambda_func=lambda epoch: 1.5)]
    },
    "finetuning": finetuning,
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bitwise_from_every_batch(kind: str, tmp_path: Path) -> None:
    """BackboneFinetuning's rates came back as in its first epoch, and schedulers stepped twice at the end of an epoch."""
    whole = trained(tmp_path / "whole", **KINDS[kind]())
    for callback in KINDS[kind]().get("callbacks", ()):
        weights, rates = by_lightning(callback)
        assert rates == whole[1]
        assert all(torch.equal(value, whole[0][name]) for name, value in weights.items())
    saved = sorted(each.parent for each in (tmp_path / "whole").glob("*/manifest.json"))
    assert len(saved) == 12
    for each in saved:
        weights, rates = trained(tmp_path / "resumed" / each.name, **KINDS[kind](), resume=each)
        assert rates == whole[1], each.name
        assert all(torch.equal(value, whole[0][name]) for name, value in weights.items()), each.name


def test_the_plug_in_does_what_the_callback_does(tmp_path: Path) -> None:
    callback, plugin = (trained(tmp_path / kind, **KINDS[kind]()) for kind in ("BaseFinetuning", "finetuning"))
    assert all(torch.equal(value, callback[0][name]) for name, value in plugin[0].items())
