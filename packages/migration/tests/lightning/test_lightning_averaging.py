"""Lightning's callbacks that average weights or write checkpoints at exceptions do as under Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

import hocket
from hocket_migration.lightning import Trainer
from hocket_migration.lightning.callbacks import check_averaging
from hocket_testkit import run_ranks


class Ordered(m.LitAutoEncoder):
    """No random numbers but those of the weights."""

    def train_dataloader(self) -> Any:
        return DataLoader(m.pairs(24, 8, 1), batch_size=4)


class Normalized(Ordered):
    """Batch norm, a schedule, and what is called in each epoch."""

    def __init__(self) -> None:
        super().__init__(hidden=4)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4, momentum=0.3))
        self.decoder = torch.nn.Linear(4, 8)
        self.called: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_train_epoch_start(self) -> None:
        self.called.append(("epoch", self.trainer.current_epoch, self.trainer.max_epochs))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append("zero_grad")

    def on_after_backward(self) -> None:
        self.called.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called.append("step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.called.append((batch_idx, self.trainer.global_step))

    def on_validation_epoch_end(self) -> None:
        self.called.append("validation")


class StepsItself(Normalized):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.called.append(("own step", batch_idx))
        optimizer.step(closure=optimizer_closure)


class EveryThird(theirs.WeightAveraging):
    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None and step_idx % 3 == 0


AVERAGING = {
    "mean": theirs.WeightAveraging,
    "ema": lambda: theirs.EMAWeightAveraging(decay=0.8),
    "ema every second": lambda: theirs.EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=4),
    "ema of epochs": lambda: theirs.EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=1),
    "without buffers": lambda: theirs.WeightAveraging(use_buffers=False, avg_fn=get_ema_avg_fn(0.7)),
    "subclass": EveryThird,
    "swa": lambda: theirs.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=2),
    "swa linear": lambda: theirs.StochasticWeightAveraging([0.05], swa_epoch_start=2, annealing_strategy="linear"),
    "swa own mean": lambda: theirs.StochasticWeightAveraging(
        0.02, swa_epoch_start=1, avg_fn=lambda mean, new, _: 0.7 * mean + 0.3 * new
    ),
}


@pytest.mark.parametrize("how", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 2}])
@pytest.mark.parametrize(
    "module",
    [Normalized, pytest.param(Ordered, marks=pytest.mark.long), pytest.param(StepsItself, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_are_those_of_lightning(kind: str, module: Any, how: dict[str, Any]) -> None:
    found = []
    for trainer_class in (Trainer, pl.Trainer):
        made, trainer, losses = m.trained(
            trainer_class, module, callbacks=[AVERAGING[kind]()], max_epochs=4, num_sanity_val_steps=0, **how
        )
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        counters = trainer.global_step, trainer.current_epoch, trainer.max_epochs
        found.append((made, losses.losses, losses.rates, metrics, counters, trainer.validate(made, verbose=False)))
    (ours, *mine), (reference, *expected) = found
    torch.testing.assert_close(ours.state_dict(), reference.state_dict(), rtol=0, atol=1e-6)
    torch.testing.assert_close(mine[:3], expected[:3], rtol=0, atol=1e-5)
    assert mine[3] == expected[3]
    assert mine[4][0] == pytest.approx(expected[4][0], abs=1e-5)
    if module is not StepsItself or not (how or "swa" in kind):  # with windows it is called before their first batch
        assert getattr(ours, "called", None) == getattr(reference, "called", None)


@pytest.mark.parametrize("kind", ["ema", "mean", "swa", "swa linear"])
@pytest.mark.parametrize("module", [Normalized, pytest.param(Ordered, marks=pytest.mark.long)])
@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.long)])
def test_averages_continue_from_a_ckpt_file(kind: str, module: Any, after: int, tmp_path: Path) -> None:
    found = []
    for trainer_class, folder in ((Trainer, tmp_path / "ours"), (pl.Trainer, tmp_path / "theirs")):
        writer = theirs.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        how = {"max_epochs": 4, "enable_checkpointing": True, "num_sanity_val_steps": 0}
        m.trained(trainer_class, module, callbacks=[AVERAGING[kind](), writer], **how)
        path = folder / f"epoch={after - 1}.ckpt"
        made, trainer, losses = m.trained(
            trainer_class,
            module,
            lambda trainer, made, path=path: trainer.fit(made, ckpt_path=path, weights_only=False),
            callbacks=[AVERAGING[kind]()],
            **{**how, "enable_checkpointing": False},
        )
        found.append((made.state_dict(), losses.losses, trainer.global_step))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["ema", "mean", "without buffers"])
def test_averages_resume_from_hockets_checkpoints(kind: str, tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def __init__(self, at: int) -> None:
            self.at = at

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == self.at:
                raise RuntimeError("enough")

    def run(folder: str, at: int = -1) -> Any:
        how = {"hocket": {"checkpoints": hocket.Checkpoints(tmp_path / folder, every="4ba"), "resume": "auto"}}
        made, trainer, _ = m.trained(Trainer, Normalized, callbacks=[AVERAGING[kind](), Stops(at)], **how)
        return made.state_dict(), trainer.validate(made, verbose=False)

    expected = run("whole")
    with pytest.raises(RuntimeError, match="enough"):
        run("parts", at=9)
    torch.testing.assert_close(run("parts"), expected, rtol=0, atol=0)


def test_averages_of_what_hocket_does_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'algorithms': \['swa'\]"):
        m.trained(Trainer, Ordered, callbacks=[AVERAGING["swa"]()], hocket={"checkpoints": str(tmp_path)})
    for kind in ("swa", "ema"):
        with pytest.raises(TypeError, match=rf"shards them. Write hocket={{'algorithms': \['{kind}'\]}}"):
            check_averaging([AVERAGING[kind]()], shards=True, resumes=False)


def test_hooks_may_change_the_number_of_epochs() -> None:
    class Longer(Ordered):
        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 0:
                self.trainer.fit_loop.max_epochs += 2

    ours, _ = m.compare(Longer, max_epochs=2)
    assert ours.current_epoch == 4


class Fails(Ordered):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 8 and self.fails:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)

    fails = True


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_checkpoint_is_written_at_an_exception(error: Any, tmp_path: Path, monkeypatch: Any) -> None:
    class FailsSo(Fails):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            try:
                return super().training_step(batch, batch_idx)
            except RuntimeError:
                raise error("out of luck") from None

    found = []
    for trainer_class, folder in ((Trainer, tmp_path / "ours"), (pl.Trainer, tmp_path / "theirs")):
        writer = theirs.OnExceptionCheckpoint(folder, "last_words")
        with pytest.raises((error, SystemExit)):
            m.trained(trainer_class, FailsSo, callbacks=[writer], enable_checkpointing=True)
        assert [each.name for each in folder.iterdir()] == ["last_words.ckpt"]
        monkeypatch.setattr(Fails, "fails", False)
        made, trainer, losses = m.trained(
            trainer_class, FailsSo, lambda trainer, made, path=writer.ckpt_path: trainer.fit(made, ckpt_path=path)
        )
        monkeypatch.undo()
        found.append((made.state_dict(), trainer.global_step, trainer.current_epoch, losses.losses))
    assert found[0][1:3] == found[1][1:3]


def test_the_checkpoint_of_exceptions_is_removed_where_there_was_none(tmp_path: Path) -> None:
    for kind in (theirs.OnExceptionCheckpoint, pl.callbacks.OnExceptionCheckpoint):
        m.trained(Trainer, BoringModel, callbacks=[kind(tmp_path)], enable_checkpointing=True, max_epochs=1)
        assert not list(tmp_path.iterdir())


class OfRanks(Ordered):
    """Layer norm, whose ranks have nothing of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 8))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_ranks_have_the_averages_of_one_process(kind: str, tmp_path: Path) -> None:
    def train(rank: int, strategy: str, size: int) -> Any:
        torch.manual_seed(1)
        module = OfRanks()
        how = {"reload_dataloaders_every_n_epochs": 2, "hocket": {"strategy": strategy}}
        trainer = Trainer(**m.arguments(max_epochs=4, callbacks=[AVERAGING[kind]()], **how))
        loaders = DataLoader(m.pairs(16, 8, 1), size), DataLoader(m.pairs(5, 8, 2), 2)
        trainer.fit(module, *loaders)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        return weights, trainer.global_step, trainer.callback_metrics["val_loss"].item()

    first, second = run_ranks(train, 2, "ddp", 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, train(0, "single", 4), rtol=0, atol=1e-5)
