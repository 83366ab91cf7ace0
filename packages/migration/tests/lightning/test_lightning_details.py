"""Steps, logged names, arguments of the environment and files by URL: details that Lightning's own tests check."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from hocket.checkpoints import CheckpointError
from hocket_migration.lightning import Trainer

BOTH = (Trainer, pl.Trainer)


# --- the arguments of steps


class Base(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


class Varargs(Base):
    def training_step(self, *args: Any) -> Any:
        self.seen.append(args[1:])
        return super().training_step(*args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args[1:], kwargs))
        return super().validation_step(*args, **kwargs)


class BatchOnly(Base):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> Any:
        return super().validation_step(batch, 0)


class WithKeywords(Base):
    def training_step(self, batch: Any, **kwargs: Any) -> Any:
        self.seen.append(kwargs)
        return super().training_step(batch, 0)


class OtherName(Base):
    def training_step(self, batch: Any, number: int) -> Any:
        self.seen.append(number)
        return super().training_step(batch, number)


class KeywordIndex(Base):
    def training_step(self, batch: Any, batch_idx: int = -1, extra: int = 5) -> Any:
        self.seen.append((batch_idx, extra))
        return super().training_step(batch, batch_idx)


def noting(step: Any) -> Any:
    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(args[1:])
        return step(self, *args, **kwargs)

    return wrapped


class Decorated(Base):
    @noting
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [Varargs, BatchOnly, WithKeywords, OtherName, KeywordIndex, Decorated])
def test_steps_get_the_arguments_that_lightning_passes(module: Any) -> None:
    ours, theirs_ = m.compare(module, max_epochs=1, limit_train_batches=3, limit_val_batches=2)
    assert ours.lightning_module.seen == theirs_.lightning_module.seen


class SeveralSets(Base):
    def val_dataloader(self) -> Any:
        return [DataLoader(RandomDataset(32, 2)) for _ in range(2)]

    def validation_step(self, *args: Any) -> Any:
        self.seen.append(args[1:])

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def test_step(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(dataloader_idx)


def test_steps_of_several_sets_get_their_number() -> None:
    found = []
    for trainer_class in BOTH:
        module = SeveralSets()
        trainer_class(**m.arguments()).validate(module, verbose=False)
        found.append(module.seen)
    assert found[0] == found[1] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_a_step_that_is_none_is_not_there(step: str) -> None:
    for trainer_class in BOTH:
        module = BoringModel()
        setattr(module, step, None)
        trainer = trainer_class(**m.arguments(max_steps=2))
        trainer.fit(module)
        assert trainer.global_step == 2


class Steps(Base):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen.append((epoch, batch_idx))
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_optimizer_step_gets_the_last_batch_of_a_window(window: int) -> None:
    ours, theirs_ = (
        m.compare(Steps, max_epochs=2, limit_train_batches=7, accumulate_grad_batches=window, rates=False)
        if (window == 1)
        else [_stepped(each, window) for each in BOTH]
    )
    assert ours.lightning_module.seen == theirs_.lightning_module.seen


def _stepped(trainer_class: Any, window: int) -> Any:
    trainer = trainer_class(**m.arguments(max_epochs=2, limit_train_batches=7, accumulate_grad_batches=window))
    trainer.fit(Steps())  # weights differ in the last window of an epoch
    return trainer


# --- optimizers that share parameters


class Shared(BoringModel):
    """Adam, then SGD, over the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2), torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[self.trainer.global_step >= 4]
        optimizer.zero_grad()
        self.manual_backward(self.step(batch))
        optimizer.step()


class SharedInPart(Shared):
    def configure_optimizers(self) -> Any:
        everything, bias = list(self.parameters()), [self.layer.bias]
        return torch.optim.Adam(everything, 1e-2), torch.optim.LBFGS(bias, 1e-2, max_iter=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):

            def closure(optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = self.step(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure) if number <= batch_idx % 2 else None


@pytest.mark.parametrize(
    "optimizer", [torch.optim.LBFGS, torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop, torch.optim.RMSprop]
)
def test_a_manual_step_returns_the_loss_before_it(optimizer: Any) -> None:
    class Returned(m.LitAutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.returned = False, []

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                steps.zero_grad()
                loss = self._reconstruct(batch)
                self.manual_backward(loss)
                return loss

            steps = self.optimizers()
            self.returned.append(steps.step(closure=closure).item())

    found = []
    for trainer_class in BOTH:
        made, _, _ = m.trained(trainer_class, Returned, max_epochs=1, limit_train_batches=3)
        found.append(made.returned)
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.parametrize("module", [Shared, SharedInPart])
def test_optimizers_of_manual_optimization_may_share_parameters(module: Any, tmp_path: Path) -> None:
    m.compare(module, max_epochs=2, limit_train_batches=6)
    found = []
    for trainer_class in BOTH:
        first = trainer_class(**m.arguments(max_epochs=1, limit_train_batches=3))
        torch.manual_seed(1)
        first.fit(module())
        first.save_checkpoint(tmp_path / "shared.ckpt")
        made, trainer, _ = m.trained(
            trainer_class,
            module,
            lambda trainer, made: trainer.fit(made, ckpt_path=tmp_path / "shared.ckpt"),
            max_epochs=2,
            limit_train_batches=3,
        )
        found.append((made.state_dict(), trainer.global_step))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


# --- logged names


class Logs(BoringModel):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def test_dataloader(self) -> Any:
        return [DataLoader(RandomDataset(32, 4)) for _ in range(3)]

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        value, several = 1.0 + dataloader_idx + batch_idx, {"add_dataloader_idx": False}
        if self.what in ("own names", "of an epoch"):
            self.log(f"own_{dataloader_idx}", value, **several)
        elif self.what == "one name":
            self.log("x", value, **several)
        elif self.what == "numbered":
            self.log("x", value)
        elif self.what == "some":
            self.log_dict({"numbered": value, "both": value})
            if dataloader_idx == 1:
                self.log("only", value, **several)

    def on_test_epoch_end(self) -> None:
        if self.what == "of an epoch":
            self.log("all", 7.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.what == "neither":
            self.log("x", 1.0, on_step=False, on_epoch=False)
        elif self.what == "another place":
            self.log("x", 1.0)
            self.log("x", 1.0, prog_bar=True)
        elif self.what == "no logger":
            self.log("x", 1.0)
            self.log("x", 1.0, logger=False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("what", ["own names", "of an epoch", "numbered", "some"])
def test_each_loader_has_the_values_that_were_logged_for_it(what: str) -> None:
    ours, known = (each(**m.arguments()).test(Logs(what), verbose=False) for each in BOTH)
    assert ours == known
    assert len(ours) == 3


@pytest.mark.parametrize("what", ["one name", "neither", "another place", "no logger"])
def test_names_that_lightning_refuses_are_refused(what: str) -> None:
    verb = "test" if what == "one name" else "fit"
    for trainer_class, error in zip(BOTH, (ValueError, MisconfigurationException), strict=True):
        with pytest.raises(error, match="log"):
            getattr(trainer_class(**m.arguments(max_steps=2)), verb)(Logs(what))


# --- arguments


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"MAX_EPOCHS": "3"}, {}),
        ({"MAX_EPOCHS": "3"}, {"max_epochs": 2}),
        ({"LIMIT_TRAIN_BATCHES": "0.5", "MAX_STEPS": "5"}, {}),
        ({"FAST_DEV_RUN": "True"}, {}),
        ({"ACCUMULATE_GRAD_BATCHES": "2", "UNKNOWN": "1"}, {"max_epochs": 1}),
    ],
)
def test_variables_are_defaults_of_arguments(variables: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    quiet = {key: value for key, value in m.arguments().items() if key != "max_epochs"}
    found = []
    for trainer_class in BOTH:
        trainer = trainer_class(**quiet, **given)
        before = trainer.max_epochs
        trainer.fit(m.LitAutoEncoder(), m.LitAutoEncoder().train_dataloader()) if variables or given else None
        names = (
            "max_epochs",
            "max_steps",
            "accumulate_grad_batches",
            "global_step",
            "current_epoch",
            "num_training_batches",
        )
        found.append((before, *(getattr(trainer, name) for name in names)))
    assert found[0] == found[1]


def test_epochs_that_were_not_given_are_known_with_a_module() -> None:
    assert [each(logger=False).max_epochs for each in BOTH] == [None, None]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_share_of_an_epoch_needs_epochs(share: float) -> None:
    for trainer_class, error in zip(BOTH, (ValueError, MisconfigurationException), strict=True):
        with pytest.raises(error, match="check_val_every_n_epoch"):
            trainer_class(val_check_interval=share, check_val_every_n_epoch=None)


@pytest.mark.parametrize("how", [{"val_check_interval": 500}, {"check_val_every_n_epoch": 9}, {"min_epochs": 3}, {}])
@pytest.mark.parametrize("fast", [2, 3])
def test_a_fast_run_validates_whatever_the_interval(how: Any, fast: Any) -> None:
    ours, theirs_ = m.compare(m.LitAutoEncoder, max_epochs=5, fast_dev_run=fast, **how)
    for name in ("val_check_interval", "check_val_every_n_epoch", "max_steps", "num_sanity_val_steps"):
        assert getattr(ours, name) == getattr(theirs_, name), name


# --- predictions


class Predicts(BoringModel):
    alive: Any = None

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        output = torch.ones(3)
        self.alive = [each for each in self.alive or [] if each() is not None] + [weakref.ref(output)]
        return output


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[int] = []

    def write_on_batch_end(self, *given: Any) -> None:
        self.written.append(1)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
        self.written.append(len(predictions))


@pytest.mark.parametrize("interval", [None, "batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("returns", [None, True, False])
def test_predictions_are_kept_for_those_who_read_them(returns: Any, interval: Any) -> None:
    found = []
    for trainer_class in BOTH:
        module, writers = Predicts(), [] if interval is None else [Writer(interval)]
        trainer = trainer_class(**m.arguments(callbacks=writers))
        returned = trainer.predict(module, DataLoader(RandomDataset(32, 6)), return_predictions=returns)
        gc.collect()
        alive = sum(each() is not None for each in module.alive)
        found.append((None if returned is None else len(returned), [each.written for each in writers], alive > 2))
    assert found[0] == found[1]


# --- fine-tuning


class Unfreezes(theirs.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, 1e-3)


class Backbone(m.LitAutoEncoder):
    """Trains its decoder first; the encoder is there by the name that `BackboneFinetuning` asks for, too."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.encoder

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.decoder.parameters()], lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(m.pairs(24, 8, 1), batch_size=4)


@pytest.mark.parametrize(
    "kind",
    [Unfreezes, lambda: theirs.BackboneFinetuning(1, backbone_initial_lr=1e-3, lambda_func=lambda epoch: 1.1)],
)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_fine_tuning_continues_from_a_ckpt_file(kind: Any, after: int, tmp_path: Path) -> None:
    found = []
    for trainer_class, folder in zip(BOTH, (tmp_path / "ours", tmp_path / "theirs"), strict=True):
        writer = theirs.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        m.trained(trainer_class, Backbone, callbacks=[kind(), writer], max_epochs=3, enable_checkpointing=True)
        made, trainer, losses = m.trained(
            trainer_class,
            Backbone,
            lambda trainer, made, path=folder / f"epoch={after - 1}.ckpt": trainer.fit(made, ckpt_path=path),
            callbacks=[kind()],
            max_epochs=4,
        )
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        found.append((made.state_dict(), losses.losses, rates, trainer.global_step))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert len(found[0][2]) == 2


# --- files by URL


@pytest.fixture
def memory() -> Any:
    file_system = pytest.importorskip("fsspec").filesystem("memory")
    yield file_system
    file_system.rm("/", recursive=True)


def test_files_by_url_are_where_lightning_writes_them(memory: Any, tmp_path: Path) -> None:
    found = []
    for trainer_class in BOTH:
        memory.rm("/", recursive=True)
        quiet = m.arguments(
            max_epochs=1, limit_train_batches=2, limit_val_batches=0, enable_checkpointing=None, logger=True
        )
        trainer = trainer_class(**quiet, default_root_dir="memory://root")
        trainer.fit(BoringModel())
        trainer.save_checkpoint("memory://own/deep/own.ckpt")
        files = sorted(each for each in memory.find("/") if each.endswith((".ckpt", ".yaml")))
        local = [each.name for each in tmp_path.rglob("*") if ":" in each.name or each.suffix == ".ckpt"]
        found.append(
            (trainer.checkpoint_callback.best_model_path, trainer.default_root_dir, trainer.log_dir, files, local)
        )
    assert found[0] == found[1]
    assert found[0][4] == [] and "/own/deep/own.ckpt" in found[0][3]


def test_a_run_continues_from_a_url(memory: Any) -> None:
    callbacks = lambda: [theirs.ModelCheckpoint("memory://ckpt", save_last=True, save_top_k=1, monitor="val_loss")]  # noqa: E731
    how = {"limit_train_batches": 3, "enable_checkpointing": True}
    trainer = Trainer(**m.arguments(max_epochs=2, callbacks=callbacks(), **how))
    trainer.fit(m.LitAutoEncoder())
    kept = sorted(memory.find("/ckpt"))
    assert len(kept) == 2 and kept[1] == "/ckpt/last.ckpt"  # others were removed
    for path in ("last", "memory://ckpt/last.ckpt"):
        continued = Trainer(**m.arguments(max_epochs=3, callbacks=callbacks(), **how))
        continued.fit(m.LitAutoEncoder(), ckpt_path=path)
        assert (continued.current_epoch, continued.global_step) == (3, 9)
    assert continued.test(m.LitAutoEncoder(), ckpt_path="memory://ckpt/last.ckpt", verbose=False)
    module = m.LitAutoEncoder.load_from_checkpoint("memory://ckpt/last.ckpt")
    torch.testing.assert_close(module.state_dict(), continued.lightning_module.state_dict())
    with pytest.raises(CheckpointError, match=r"There is no checkpoint file 'memory://none\.ckpt'"):
        continued.fit(m.LitAutoEncoder(), ckpt_path="memory://none.ckpt")


def test_the_checkpoint_of_an_exception_may_be_remote(memory: Any) -> None:
    class Fails(BoringModel):
        def on_train_batch_end(self, *given: Any) -> None:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Trainer(
            **m.arguments(callbacks=[theirs.OnExceptionCheckpoint("memory://words")], enable_checkpointing=True)
        ).fit(Fails())
    assert memory.find("/words") == ["/words/on_exception.ckpt"]
    Trainer(
        **m.arguments(
            callbacks=[theirs.OnExceptionCheckpoint("memory://words")], enable_checkpointing=True, max_epochs=1
        )
    ).fit(BoringModel())
    assert memory.find("/words") == []


# --- profilers


class Measured(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("own block"):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [pl.profilers.SimpleProfiler, pl.profilers.AdvancedProfiler])
def test_profilers_measure_the_blocks_that_modules_name(kind: Any, tmp_path: Path) -> None:
    profiler = kind(dirpath=tmp_path / "profiles", filename="blocks")
    trainer = Trainer(**m.arguments(max_epochs=1, limit_train_batches=4, profiler=profiler))
    trainer.fit(Measured())
    assert trainer.profiler is profiler and trainer._translated["profile"] is True
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name.startswith("fit-blocks")
    assert "own block" in file.read_text()


@pytest.mark.parametrize(("kind", "profiles"), [("PyTorchProfiler", True), ("PassThroughProfiler", False)])
def test_other_profilers_are_hockets_or_none(kind: str, profiles: bool) -> None:
    trainer = Trainer(**m.arguments(max_epochs=1, limit_train_batches=2, profiler=getattr(pl.profilers, kind)()))
    trainer.fit(Measured())
    assert trainer._translated.get("profile") == (profiles or None)
