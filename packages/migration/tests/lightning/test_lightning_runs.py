"""What a run under hocket adds: plug-ins, checkpoints of both kinds, several ranks; and what is refused by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import modules as m
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

import hocket
from hocket.checkpoints import CheckpointError
from hocket_migration.lightning import LightningTask, Trainer
from hocket_migration.lightning.algorithms import INSTEAD
from hocket_testkit import run_ranks


class Remembers(m.VAE):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["mine"] = {"numbers": [1, 2]}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.loaded = checkpoint["mine"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit_with(
    trainer_class: Any, folder: Path, module: Any = Remembers, path: Any = None, **others: Any
) -> tuple[Any, Any]:
    torch.manual_seed(4)
    made, losses = module(), m.Losses()
    settings = m.arguments(
        enable_checkpointing=True, logger=pl.loggers.CSVLogger(folder), log_every_n_steps=2, max_epochs=2
    )
    callbacks = [
        losses,
        theirs.ModelCheckpoint(folder, monitor="val_loss", save_last=True),
        theirs.EarlyStopping("val_loss", patience=2),
        theirs.LearningRateMonitor(),
        theirs.Timer(),
    ]
    trainer = trainer_class(**(settings | {"callbacks": callbacks} | others))
    trainer.fit(made, ckpt_path=path)
    return trainer, losses.losses


def test_lightnings_callbacks_loggers_and_checkpoints_do_as_under_lightning(tmp_path: Path) -> None:
    ours, mine = fit_with(Trainer, tmp_path / "ours")
    reference, expected = fit_with(pl.Trainer, tmp_path / "theirs")
    assert mine == pytest.approx(expected, abs=1e-6)
    found, known = (sorted(each.name for each in (tmp_path / name).glob("*.ckpt")) for name in ("ours", "theirs"))
    assert found == known
    rows, expected_rows = (Path(each.log_dir, "metrics.csv").read_text().splitlines() for each in (ours, reference))
    assert [row.split(",")[:3] for row in rows] == [row.split(",")[:3] for row in expected_rows]
    assert ours.checkpoint_callback.best_model_score == pytest.approx(
        reference.checkpoint_callback.best_model_score.item()
    )
    loaded = Remembers.load_from_checkpoint(ours.checkpoint_callback.best_model_path)
    assert loaded.hparams == reference.lightning_module.hparams
    assert loaded.loaded == {"numbers": [1, 2]}


@pytest.mark.parametrize("writer", [Trainer, pl.Trainer])
def test_a_ckpt_file_continues_a_run_of_either_trainer(writer: Any, tmp_path: Path) -> None:
    fit_with(writer, tmp_path / "first")
    path = tmp_path / "first" / "last.ckpt"
    ours, mine = fit_with(Trainer, tmp_path / "ours", path=path, max_epochs=4)
    reference, expected = fit_with(pl.Trainer, tmp_path / "theirs", path=path, max_epochs=4)
    assert len(mine) == len(expected) > 6
    assert mine == pytest.approx(expected, abs=1e-6)
    assert ours.global_step == reference.global_step == 24
    assert ours.optimizers[0].param_groups[0]["lr"] == reference.optimizers[0].param_groups[0]["lr"]
    assert ours.lightning_module.loaded == {"numbers": [1, 2]}


def test_a_ckpt_file_from_within_an_epoch_continues_with_the_remaining_batches(tmp_path: Path) -> None:
    class Ordered(Remembers):
        def train_dataloader(self) -> Any:
            return DataLoader(m.pairs(24, 8, 1), batch_size=4)

        def _reconstruct(self, batch: Any) -> Any:
            return ((self.decoder(self.encoder[0](batch[0])[:, :2]) - batch[0]) ** 2).mean()

    writer = theirs.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit_with(pl.Trainer, tmp_path, Ordered, callbacks=[losses := m.Losses(), writer])
    path = next(tmp_path.glob("*step=4.ckpt"))
    trainer, _ = fit_with(Trainer, tmp_path / "b", Ordered, path=path, callbacks=[again := m.Losses()])
    assert again.losses == pytest.approx(losses.losses[4:], abs=1e-6)
    assert trainer.global_step == len(losses.losses) == 12


class Saves(pl.Callback):
    """Writes a file in each hook from which one is usual."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch_end_{trainer.current_epoch}.ckpt")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validation_end_{trainer.current_epoch}.ckpt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "train_end.ckpt")


def test_a_ckpt_file_of_any_moment_has_lightnings_counters_and_continues_alike(tmp_path: Path) -> None:
    def counters(trainer_class: Any, folder: Path) -> dict[str, Any]:
        callbacks = [Saves(folder), theirs.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)]
        trainer, _ = fit_with(trainer_class, folder, m.LitAutoEncoder, callbacks=callbacks)
        trainer.save_checkpoint(folder / "after.ckpt")
        loops = {path.name: torch.load(path)["loops"]["fit_loop"] for path in sorted(folder.glob("*.ckpt"))}
        kept = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
        return {name: [loop[each] for each in kept] for name, loop in loops.items()}

    def batches(trainer_class: Any, path: Path) -> tuple[int, ...]:
        trainer, _ = fit_with(trainer_class, tmp_path / "on", m.LitAutoEncoder, path, max_epochs=3, callbacks=[])
        return trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped

    assert counters(Trainer, tmp_path / "ours") == counters(pl.Trainer, tmp_path / "theirs")
    for name in ("after", "train_end", "epoch=1-step=8"):
        for folder in ("ours", "theirs"):
            assert batches(Trainer, tmp_path / folder / f"{name}.ckpt") == (18, 3, 18)
    assert batches(pl.Trainer, tmp_path / "ours" / "epoch=1-step=8.ckpt") == (18, 3, 18)


class Writes(m.ImageClassifier):
    """Writes in ``training_step`` what the message says."""

    instead = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits, cross_entropy = self(x), torch.nn.functional.cross_entropy
        names = {**locals(), "F": torch.nn.functional, "loss": cross_entropy(logits, y)}
        for package in ("hocket_general", "hocket_nlp", "hocket_vision"):
            import_module(f"{package}.functional")
            names[package] = import_module(package)
        exec(self.instead, names)
        return names["loss"] + cross_entropy(self(names["x"]), y[: len(names["x"])])


class Between(hocket.Algorithm):
    events: ClassVar = {hocket.Event.BEFORE_LOSS}

    def apply(self, event: Any, state: Any) -> None:
        raise AssertionError("refused before")


@pytest.mark.parametrize("name", [*INSTEAD, Between()])
def test_algorithms_between_outputs_and_loss_are_refused_with_what_to_write(name: Any) -> None:
    with pytest.raises(hocket.plugins.PluginError, match="training_step of ImageClassifier computes both") as raised:
        hocket.Trainer(model=LightningTask(m.ImageClassifier(), total_steps=1), algorithms=[name], device="cpu")
    module = Writes()
    if isinstance(name, str):
        module.instead = str(raised.value).partition("write in training_step: ")[2]
        assert module.instead == INSTEAD[name]
    Trainer(**m.arguments(max_epochs=1)).fit(module, datamodule=m.DigitsDataModule())


class BlurredImages(m.ImageClassifier):
    """Trains with plug-ins of hocket's that change modules and weights."""


def fit_images(**extra: Any) -> Trainer:
    torch.manual_seed(2)
    trainer = Trainer(**m.arguments(max_epochs=2), hocket=extra)
    trainer.fit(BlurredImages(), datamodule=m.DigitsDataModule())
    return trainer


def test_hockets_algorithms_act_on_the_module() -> None:
    stopping = {"early-stopping": {"monitor": "val_dataloader_0/val_acc/dataloader_idx_0", "mode": "max"}}
    trainer = fit_images(algorithms=["ema", {"blurpool": {"min_channels": 1}}], callbacks=["lr-monitor", stopping])
    module = trainer.lightning_module
    assert type(module.net[0]).__name__ == "BlurConv2d"
    assert trainer.hocket.state.metrics["val_dataloader_0/val_acc/dataloader_idx_0"] >= 0
    average = trainer.hocket.model_state_dict(evaluated=True)
    assert not torch.equal(average["net.4.weight"], module.state_dict()["net.4.weight"])
    assert torch.isfinite(trainer.callback_metrics["train/loss_epoch"])


class Measures(m.LitAutoEncoder):
    """Logs means of epochs, also by a metric, and has a schedule that monitors a value of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        config = {"scheduler": scheduler, "monitor": "val_loss", "interval": "step", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize("lost", [3, pytest.param(9, marks=pytest.mark.long)])
@pytest.mark.parametrize("module", [Remembers, Measures, m.GAN, m.Accumulating])
def test_hockets_checkpoints_resume_exactly(module: Any, lost: int, tmp_path: Path) -> None:
    def run(name: str, **extra: Any) -> Trainer:
        torch.manual_seed(6)
        given = {"checkpoints": hocket.Checkpoints(tmp_path / name, every="2ba"), "run_name": name, **extra}
        trainer = Trainer(**m.arguments(max_epochs=2), hocket=given)
        trainer.fit(module())
        return trainer

    whole = run("whole")
    with pytest.raises(RuntimeError, match="the machine is lost"):
        run("parts", callbacks=[Lost(lost)])
    resumed = run("parts", resume="auto")
    assert resumed.global_step == whole.global_step
    assert resumed.callback_metrics == whole.callback_metrics
    ours, expected = resumed.lightning_module.state_dict(), whole.lightning_module.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


class Lost(hocket.Callback):
    """Ends a run after some batches, one after the latest checkpoint."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def batch_end(self, state: Any) -> None:
        if state.timestamp.batch == self.batches:
            raise RuntimeError("the machine is lost")


class Means(m.LitAutoEncoder):
    """Logs what tells which samples were seen."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", batch[0].mean())
        self.log("val_count", float(len(batch[0])), reduce_fx="sum")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_on_the_mean_of_both_and_evaluate_each_sample_once(strategy: str, tmp_path: Path) -> None:
    data = m.pairs(16, 8, 1)

    def train(rank: int, strategy: Any, size: int) -> Any:
        torch.manual_seed(1)
        trainer = Trainer(
            **m.arguments(max_epochs=2, num_sanity_val_steps=0), hocket={"strategy": strategy, "folder": tmp_path}
        )
        trainer.fit(Means(), DataLoader(data, size), DataLoader(m.pairs(5, 8, 2), 2))
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return (
            found,
            {name: each.clone() for name, each in trainer.hocket.model_state_dict().items()},
            trainer.global_step,
        )

    results = run_ranks(train, 2, strategy, 4)
    alone, weights, steps = train(0, "single", 8)
    expected = m.pairs(5, 8, 2).tensors[0].mean().item()
    for found, theirs_, taken in results:
        assert taken == steps == 4
        torch.testing.assert_close(theirs_, weights, rtol=0, atol=1e-5)
        assert found["val_count"] == 5
        assert found["val_mean"] == pytest.approx(expected, abs=1e-6)
        assert found["train_loss_epoch"] == pytest.approx(alone["train_loss_epoch"], abs=1e-5)


@pytest.mark.parametrize("how", [{"val_check_interval": 2}, {"accumulate_grad_batches": 2}])
def test_two_ranks_with_a_distributed_sampler_train_as_under_lightning(how: dict[str, Any]) -> None:
    def train(rank: int, kind: Any, given: dict[str, Any]) -> Any:
        def loader(samples: int) -> Any:
            data = m.pairs(samples, 8, samples)
            return DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank, shuffle=samples == 16))

        torch.manual_seed(1)
        trainer = kind(**m.arguments(max_epochs=2, callbacks=[losses := m.Losses()], **how) | given)
        trainer.fit(module := Means(), loader(16), loader(8))
        return losses.losses, {name: each.clone() for name, each in module.state_dict().items()}, trainer.global_step

    ours = run_ranks(train, 2, Trainer, {"hocket": {"strategy": "ddp"}})
    expected = run_ranks(train, 2, pl.Trainer, {"strategy": "ddp", "devices": 2})
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


class Places(pl.Callback):
    def __init__(self) -> None:
        self.found: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(trainer.batch_idx)


@pytest.mark.parametrize("samples", [16, 14])
def test_ranks_validate_together_within_a_window_and_at_the_end_of_the_last(samples: int) -> None:
    def train(rank: int) -> list[int]:
        given = m.arguments(max_epochs=1, num_sanity_val_steps=0, accumulate_grad_batches=2, val_check_interval=1)
        trainer = Trainer(**given | {"callbacks": [places := Places()]}, hocket={"strategy": "ddp"})
        trainer.fit(Means(), DataLoader(m.pairs(samples, 8, 1), 2), DataLoader(m.pairs(5, 8, 2), 2))
        return places.found

    assert run_ranks(train, 2) == [[0, 1, 3]] * 2


class Quiet(m.Accumulating):
    """Manual optimization without random numbers or logs that differ between ranks."""


def test_manual_optimization_on_two_ranks_steps_on_the_mean() -> None:
    data = m.pairs(16, 4, 1)

    def train(rank: int, strategy: Any, size: int) -> Any:
        torch.manual_seed(1)
        trainer = Trainer(**m.arguments(max_epochs=1), hocket={"strategy": strategy})
        trainer.fit(Quiet(), DataLoader(data, size))
        return trainer.hocket.model_state_dict()

    first, second = run_ranks(train, 2, "ddp", 2)
    weights = train(0, "single", 4)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, weights, rtol=0, atol=1e-5)


def test_manual_optimization_is_refused_under_fsdp() -> None:
    def train(rank: int) -> None:
        Trainer(**m.arguments(max_epochs=1), hocket={"strategy": "fsdp"}).fit(m.GAN())

    with pytest.raises(Exception, match="manual optimization, which needs full parameters"):
        run_ranks(train, 2)


def test_the_adapter_logs_and_evaluates_in_a_trainer_of_hocket() -> None:
    module = m.LitAutoEncoder()
    trainer = hocket.Trainer(
        model=LightningTask(module),
        train_data=module.train_dataloader(),
        eval_data={"val": module.val_dataloader()},
        callbacks=[{"early-stopping": {"monitor": "val/val_loss", "patience": 1}}],
        duration="2ep",
        device="cpu",
    )
    result = trainer.fit()
    assert result.metrics["val/val_loss"] == pytest.approx(trainer.evaluate()["val/val_loss"])
    assert "train_loss_epoch" in result.history
    assert module.trainer.current_epoch == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_epoch": 3}, r"Did you mean max_epochs="),
        ({"algorithms": ["ema"]}, r"hocket=\{'algorithms'"),
        ({"barebones": True}, "barebones=True"),
        ({"plugins": ["x"]}, "has no counterpart"),
        ({"strategy": "deepspeed_stage_2"}, r"hocket=\{'strategy'"),
        ({"precision": "transformer-engine"}, r"precision='transformer-engine'"),
        ({"accelerator": "hpu"}, "accelerator='hpu'"),
        ({"devices": [1, 3]}, "CUDA_VISIBLE_DEVICES"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "l1"}, "neither 'norm' nor 'value'"),
        ({"max_time": "1h"}, "DD:HH:MM:SS"),
        ({"hocket": {"train_data": []}}, "given to fit"),
        ({"profiler": object()}, "profiler='simple'"),
    ],
)
def test_arguments_without_a_counterpart_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer(**given)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: theirs.GradientAccumulationScheduler({0: 2}), "accumulate_grad_batches"),
        (lambda: theirs.DeviceStatsMonitor(), "memory-monitor"),
        (lambda: theirs.EarlyStopping, r"Give an instance: EarlyStopping\("),
        (lambda: hocket.Callback(), r"hocket=\{'callbacks'"),
    ],
)
def test_callbacks_of_lightnings_own_loop_are_refused_by_name(callback: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Trainer(**m.arguments(callbacks=[callback()])).fit(BoringModel())


@pytest.mark.parametrize("given", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_manual_optimization_refuses_what_it_does_by_hand(given: dict[str, Any]) -> None:
    with pytest.raises(hocket.plugins.PluginError, match="GAN has manual optimization"):
        Trainer(**m.arguments(**given)).fit(m.GAN())


class WithoutOptimizer(m.LitAutoEncoder):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:configure_optimizers.. of WithoutOptimizer returned None")
def test_a_module_without_an_optimizer_keeps_its_weights() -> None:
    module, before = WithoutOptimizer(), WithoutOptimizer()
    before.load_state_dict(module.state_dict())
    trainer = Trainer(**m.arguments(max_epochs=1))
    trainer.fit(module)
    assert trainer.global_step == 6
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Training is over")
def test_a_second_fit_counts_on() -> None:
    trainer, module = Trainer(**m.arguments(max_epochs=1)), m.LitAutoEncoder()
    trainer.fit(module)
    trainer.fit(module)
    assert (trainer.global_step, trainer.current_epoch) == (6, 1)


def test_what_is_not_a_lightning_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not a LightningModule"):
        LightningTask(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="is a class"):
        LightningTask(BoringModel)
    with pytest.raises(TypeError, match="not a LightningModule"):
        Trainer(**m.arguments()).fit(torch.nn.Linear(2, 2))


def test_a_trainer_of_hocket_tells_users_of_a_lightning_module_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"hocket_migration.lightning.LightningTask\(BoringModel"):
        hocket.Trainer(model=BoringModel(), device="cpu")


def test_an_attribute_that_is_not_there_is_named() -> None:
    trainer = Trainer(**m.arguments())
    with pytest.raises(AttributeError, match=r"trainer\.fit_looop is not available under hocket"):
        _ = trainer.fit_looop


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"needs Lightning.*pip install .lightning"):
        Trainer()


@pytest.mark.parametrize(
    "given",
    [
        {"limit_val_batches": 2.5},
        {"limit_train_batches": -1},
        {"val_check_interval": 0},
        {"val_check_interval": 1.5},
        {"check_val_every_n_epoch": 0},
        {"accumulate_grad_batches": 0},
        {"max_epochs": -2},
        {"max_steps": 1.5},
        {"profiler": "foo"},
        {"gradient_clip_algorithm": "foo"},
        {"devices": 0},
        {"accelerator": "tpu"},
        {"hocket": ["ema"]},
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(given))):
        Trainer(**given)


@pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="needs a machine without a GPU"
)
@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(accelerator: str) -> None:
    with pytest.raises(ValueError, match="there is no such device"):
        Trainer(accelerator=accelerator)


def test_a_share_of_less_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a share of 6 batches"):
        Trainer(**m.arguments(limit_train_batches=0.1)).fit(m.LitAutoEncoder())


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_a_module_that_cannot_be_trained_is_refused(name: str) -> None:
    kind = type("Lacks", (m.LitAutoEncoder,), {name: getattr(pl.LightningModule, name)})
    with pytest.raises(TypeError, match=f"Lacks has no {name}"):
        Trainer(**m.arguments()).fit(kind())


@pytest.mark.parametrize(
    "name", ["training_epoch_end", "validation_epoch_end", "test_epoch_end", "configure_sharded_model"]
)
def test_methods_of_earlier_versions_are_refused(name: str) -> None:
    kind = type("Old", (m.LitAutoEncoder,), {name: lambda self, outputs=None: None})
    with pytest.raises(TypeError, match=f"Old defines {name}, which is not called"):
        Trainer(**m.arguments()).fit(kind())


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "predict_step"])
def test_steps_that_fetch_batches_are_refused(name: str) -> None:
    kind = type("Fetches", (m.LitAutoEncoder,), {name: lambda self, dataloader_iter: None})
    with pytest.raises(TypeError, match=rf"{name}\(dataloader_iter\) of Fetches"):
        Trainer(**m.arguments()).fit(kind())


def test_arguments_that_are_set_as_attributes_act_in_the_next_fit() -> None:
    def steps(trainer_class: Any) -> list[Any]:
        trainer = trainer_class(**m.arguments(max_epochs=1, callbacks=[losses := m.Losses()]))
        trainer.limit_train_batches = 4
        trainer.accumulate_grad_batches = 2
        trainer.gradient_clip_val = 1e-3
        trainer.limit_val_batches = 0
        torch.manual_seed(2)
        trainer.fit(module := m.LitAutoEncoder())
        found = [trainer.global_step, trainer.current_epoch, "val_loss" in trainer.callback_metrics, *losses.losses]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        return [*found, trainer.global_step, trainer.current_epoch, trainer.max_epochs, len(losses.losses)]

    assert steps(Trainer) == pytest.approx(steps(pl.Trainer), abs=1e-6)


def test_arguments_cannot_be_changed_during_a_fit() -> None:
    class Changes(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 4

    with pytest.raises(AttributeError, match=r"Write Trainer\(accumulate_grad_batches=4\)"):
        Trainer(**m.arguments(callbacks=[Changes()])).fit(m.LitAutoEncoder())
    trainer = Trainer(**m.arguments())
    with pytest.raises(ValueError, match=r"limit_val_batches=2\.5"):
        trainer.limit_val_batches = 2.5
    with pytest.raises(AttributeError, match="batch_idx"):
        trainer.fit_loop.epoch_loop.batch_idx = 3
    with pytest.raises(AttributeError, match="Give its counterpart to hocket"):
        LightningTask(m.LitAutoEncoder()).trainer.limit_train_batches = 2


def test_lightnings_tuner_is_refused() -> None:
    from lightning.pytorch.tuner import Tuner

    with pytest.raises(TypeError, match="hocket sweep"):
        Tuner(Trainer(**m.arguments())).lr_find(m.LitAutoEncoder(), attr_name="lr")
    with pytest.raises(TypeError, match="'microbatch': 'auto'"):
        Tuner(Trainer(**m.arguments())).scale_batch_size(m.LitAutoEncoder(), batch_arg_name="lr")


def test_under_fsdp_ckpt_files_are_refused_before_training_and_omitted_by_default(tmp_path: Path) -> None:
    def train(rank: int, given: dict[str, Any]) -> int:
        trainer = Trainer(
            **m.arguments(max_epochs=1, enable_checkpointing=None, **given),
            hocket={"strategy": "fsdp", "folder": tmp_path},
        )
        trainer.fit(m.LitAutoEncoder())
        return len(trainer.checkpoint_callbacks)

    assert run_ranks(train, 2, {}) == [0, 0]
    with pytest.raises(Exception, match="no ModelCheckpoint"):
        run_ranks(train, 2, {"callbacks": [theirs.ModelCheckpoint(tmp_path)]})


@pytest.mark.parametrize(
    ("module", "steps"), [(m.GAN, {"max_steps": 6}), (m.GAN, {"max_steps": 15}), (m.Accumulating, {"max_steps": 10})]
)
def test_manual_optimization_ends_by_the_steps_of_its_optimizers(module: Any, steps: dict[str, Any]) -> None:
    m.compare(module, rates=False, metrics=False, max_epochs=-1, **steps)


class Estimates(m.LitAutoEncoder):
    """Asks for the number of steps as schedules do."""

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.gathered = self.all_gather(torch.ones(3)).shape


@pytest.mark.parametrize(
    "extra", [{"accumulate": "2ba"}, {"duration": "1ep"}, {"duration": ["9ep", "7ba"]}, {"limit_train": 4}]
)
def test_estimated_steps_are_those_of_the_run(extra: dict[str, Any]) -> None:
    trainer = Trainer(**m.arguments(max_epochs=2), hocket=extra)
    trainer.fit(module := Estimates())
    assert module.estimated == trainer.global_step
    assert module.gathered == (3,)


def test_estimated_steps_are_those_of_a_rank() -> None:
    def train(rank: int, trainer_class: Any, given: dict[str, Any]) -> Any:
        trainer = trainer_class(**m.arguments(max_epochs=2), **given)
        trainer.fit(module := Estimates())
        return module.estimated, trainer.global_step, trainer.num_training_batches, tuple(module.gathered)

    ours = run_ranks(train, 2, Trainer, {"hocket": {"strategy": "ddp"}})
    theirs_ = run_ranks(train, 2, pl.Trainer, {"strategy": "ddp", "devices": 2})
    assert ours == theirs_ == [(6, 6, 3, (2, 3))] * 2


def test_a_module_in_eval_mode_stays_so() -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module.eval())
        assert not any(each.training for each in module.modules())

    m.compare(m.VAE, fit, max_epochs=2)


class TakesNoLoader(BoringModel):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]


class OfTwoOptimizers(BoringModel):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        return self.step(batch)


class NeedsALoader(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        pass


def _garbage(trainer: Any) -> None:
    Path("a.ckpt").write_bytes(b"garbage")
    trainer.fit(BoringModel(), ckpt_path="a.ckpt")


def _past_the_end(trainer: Any) -> None:
    longer = Trainer(**m.arguments(max_epochs=3, limit_train_batches=1, limit_val_batches=0))
    longer.fit(BoringModel())
    longer.save_checkpoint("a.ckpt")
    trainer.fit(BoringModel(), ckpt_path="a.ckpt")


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda trainer: trainer.fit(BoringModel(), train_dataloader=[]), "Did you mean train_dataloaders="),
        (lambda trainer: trainer.validate(BoringModel(), loader=[]), "Did you mean dataloaders="),
        (lambda trainer: trainer.save_checkpoint("a.ckpt"), "Call fit or validate first"),
        (lambda trainer: trainer.fit_loop.setup_data(), "estimated_stepping_batches"),
        (lambda trainer: trainer.fit_loop.epoch_loop.batch_progress_of, "trainer.current_epoch"),
        (lambda trainer: Trainer(resume_from_checkpoint="a.ckpt"), r"ckpt_path="),
        (lambda trainer: Trainer(gpus=1), "accelerator='gpu', devices="),
        (
            lambda trainer: Trainer(strategy=DDPStrategy(find_unused_parameters=True)),
            "'ddp_find_unused_parameters_true'",
        ),
        (lambda trainer: trainer.fit(OfTwoOptimizers()), "automatic_optimization = False"),
        (_garbage, "not a file that torch.save wrote"),
        (_past_the_end, "Write max_epochs="),
        (lambda trainer: trainer.validate(TakesNoLoader()), "batch_idx, dataloader_idx"),
        (lambda trainer: trainer.validate(NeedsALoader()), "give dataloader_idx the default 0"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(act: Any, match: str) -> None:
    trainer = Trainer(**m.arguments(max_epochs=1, limit_train_batches=1, limit_val_batches=1))
    with pytest.raises((TypeError, ValueError, AttributeError, CheckpointError), match=match):
        act(trainer)
