"""What modules, callbacks and scripts read of the Trainer, and what they log, compared with Lightning's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")

import torch  # noqa: E402
from lightning.pytorch import callbacks as theirs  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

sys.path.append(str(Path(__file__).parent))

import modules as m  # noqa: E402

import hocket  # noqa: E402
from hocket_migration.lightning import LightningTask, Trainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("in_an_empty_folder"),
]


class Names(m.LitAutoEncoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._reconstruct(batch)
        self.log_dict({name: loss for name in ("loss", "epoch", "batch", "seconds", "train/loss", "val/loss")})

    test_step = validation_step


class Logging(pl.Callback):
    """A callback that logs by itself."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("position", float(batch_idx), on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log_dict({"validated": 1.0})


def test_a_name_of_hockets_own_is_logged_in_an_evaluation() -> None:
    trainer, reference = m.compare(Names, max_epochs=2)
    ours, expected = (each.test(each.lightning_module, verbose=False)[0] for each in (trainer, reference))
    assert len(ours) == 6
    assert ours == pytest.approx(expected)
    assert {"train/loss", "val/loss"} <= {name.removeprefix("val_dataloader/") for name in trainer.hocket.state.metrics}


def test_callbacks_log_by_themselves() -> None:
    trainer, _ = m.compare(m.LitAutoEncoder, callbacks=[Logging()], max_epochs=2)
    assert {"position_step", "position_epoch", "validated"} <= trainer.callback_metrics.keys()
