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


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
def test_a_trainer_has_loggers_callbacks_and_state_before_a_fit(kind: Any, tmp_path: Path) -> None:
    trainer = kind(default_root_dir=tmp_path, max_epochs=1, enable_progress_bar=False, enable_model_summary=False)
    trainer.logger.log_hyperparams({"lr": 0.1})
    trainer.checkpoint_callback.dirpath = str(tmp_path / "files")
    trainer.callbacks.append(losses := m.Losses())
    assert trainer.state.fn is None
    assert trainer.lightning_module is None is trainer.model
    assert str(tmp_path) in trainer.log_dir
    trainer.fit(m.LitAutoEncoder())
    assert len(losses.losses) == 6
    assert list((tmp_path / "files").iterdir())


class InSetup(m.LitAutoEncoder):
    def setup(self, stage: str) -> None:
        self.total = self.trainer.estimated_stepping_batches

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return [DataLoader(m.pairs(22, 8, 1), batch_size=4, shuffle=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._reconstruct(batch[0])


def test_the_number_of_steps_is_known_in_setup() -> None:
    trainer, reference = m.compare(InSetup, max_epochs=2)
    assert trainer.lightning_module.total == reference.lightning_module.total == 12


class Writer(theirs.BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.calls: list[Any] = []

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.calls.append(predictions)

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *others: Any) -> None:
        self.calls.append((prediction, others[2:]))

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("start")


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("interval", ["epoch", "batch_and_epoch"])
def test_prediction_writers_get_all_predictions_once(interval: str, loaders: int) -> None:
    def run(kind: Any) -> Any:
        torch.manual_seed(1)

        class Module(m.LitAutoEncoder):
            def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return self(batch[0])

        data = [DataLoader(m.pairs(5 + number, 8, number), batch_size=2) for number in range(loaders)]
        trainer = kind(**m.arguments(callbacks=[writer := Writer(interval)]))
        return writer.calls, trainer.predict(Module(), data if loaders > 1 else data[0])

    ours, expected = run(Trainer), run(pl.Trainer)
    torch.testing.assert_close(ours[1], expected[1])
    assert len(ours[0]) == len(expected[0])
    for mine, other in zip(ours[0], expected[0], strict=True):
        if isinstance(mine, str):
            assert mine == other
        else:
            torch.testing.assert_close(mine, other)


def test_the_last_checkpoint_may_not_exist_yet(tmp_path: Path) -> None:
    trainer = Trainer(**m.arguments(max_epochs=1, enable_checkpointing=True), default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="no checkpoint yet"):
        trainer.fit(m.LitAutoEncoder(), ckpt_path="last")
    assert trainer.global_step == 6


class Failing(pl.LightningDataModule):
    seen: Any = None

    def train_dataloader(self) -> Any:
        return DataLoader(m.pairs(8, 8, 1), batch_size=4)

    def on_exception(self, exception: BaseException) -> None:
        self.seen = exception, self.trainer.interrupted


class Reads(m.LitAutoEncoder):
    fails = False

    def on_train_start(self) -> None:
        trainer = self.trainer
        with trainer.profiler.profile("x"):
            limits = [getattr(trainer, f"num_{name}_batches") for name in ("training", "val")]
        self.read = [trainer.precision, limits, type(trainer.val_dataloaders).__name__, trainer.interrupted]
        if self.fails:
            raise OSError("disk")


def test_modules_read_the_same_of_a_trainer() -> None:
    for others in ({}, {"fast_dev_run": True}, {"fast_dev_run": 2}, {"precision": "bf16-mixed"}):
        read = []
        for kind in (pl.Trainer, Trainer):
            module = Reads()
            kind(**m.arguments(max_epochs=1, **others)).fit(module)
            read.append(module.read)
        assert read[0] == read[1]


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
def test_a_data_module_is_told_of_exceptions(kind: Any) -> None:
    module, data = Reads(), Failing()
    module.fails = True
    trainer = kind(**m.arguments(max_epochs=1))
    with pytest.raises(OSError, match="disk") as raised:
        trainer.fit(module, datamodule=data)
    assert data.seen == (raised.value, True)
    assert trainer.interrupted
