"""Unmodified modules train as they do under Lightning: each loss, learning rate, weight and logged value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from lightning.pytorch.demos import boring_classes as boring, lstm, transformer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from hocket_migration.lightning import Trainer


def with_loader(samples: int, features: int, size: int) -> Any:
    return lambda trainer, module: trainer.fit(module, DataLoader(boring.RandomDataset(features, samples), size))


@pytest.mark.parametrize(
    ("module", "how"),
    [
        (boring.BoringModel, {}),
        (boring.BoringModel, {"accumulate_grad_batches": 4}),
        (boring.BoringModel, {"gradient_clip_val": 0.05}),
        (boring.BoringModel, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        (boring.BoringModel, {"limit_train_batches": 5, "limit_val_batches": 2, "num_sanity_val_steps": 0}),
        (boring.ManualOptimBoringModel, {}),
        (m.LitAutoEncoder, {}),
        (m.LitAutoEncoder, {"max_steps": 8, "max_epochs": -1}),
        (m.VAE, {"val_check_interval": 2}),
        (m.VAE, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        (m.VAE, {"check_val_every_n_epoch": 2, "num_sanity_val_steps": -1}),
        (m.GAN, {}),
        (m.Accumulating, {}),
        (m.LanguageModel, {}),
        (m.Reinforce, {}),
    ],
)
def test_every_loss_and_weight_is_lightnings(module: Any, how: dict[str, Any]) -> None:
    m.compare(module, **{"max_epochs": 2, "limit_train_batches": 8, **how})


def test_a_data_module_with_torchmetrics_and_a_schedule_of_the_whole_run() -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, datamodule=m.DigitsDataModule())

    trainer, reference = m.compare(m.ImageClassifier, fit, max_epochs=2)
    module, data = trainer.lightning_module, trainer.datamodule
    assert data.prepared
    ours, theirs = (
        trainer.test(module, datamodule=data, verbose=False),
        reference.test(reference.lightning_module, datamodule=reference.datamodule, verbose=False),
    )
    assert len(ours) == len(theirs) == 1
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    ours, theirs = (
        trainer.validate(module, datamodule=data, verbose=False),
        reference.validate(reference.lightning_module, datamodule=reference.datamodule, verbose=False),
    )
    for mine, known in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(known, abs=1e-6)
    predicted, expected = (
        trainer.predict(module, datamodule=data),
        reference.predict(reference.lightning_module, datamodule=reference.datamodule),
    )
    assert torch.equal(torch.cat(predicted), torch.cat(expected))


@pytest.mark.parametrize("data", [boring.BoringDataModule, boring.BoringDataModuleNoLen])
def test_the_demonstration_data_modules(data: Any) -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, datamodule=data())

    # Without a length, hocket notices the last batch after it.
    m.compare(boring.BoringModel, fit, max_epochs=1, rates=data is boring.BoringDataModule)


class OnTwoLoaders(boring.BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(batch, list)
        return self.step(batch[0]) + self.step(batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("x", self.step(batch))


def test_several_loaders_side_by_side() -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, datamodule=boring.IterableBoringDataModule())

    m.compare(OnTwoLoaders, fit, max_epochs=1, rates=False, metrics=False)


class OnCombinedLoaders(boring.BoringModel):
    """Takes batches of any form, in which a loader that has ended may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.forms: list[str] = []

    def _loss(self, batch: Any) -> Any:
        leaves, form = tree_flatten(batch)
        self.forms.append(str(form))
        return torch.stack([self.step(each) for each in leaves if each is not None]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self._loss(batch) * (batch_idx + 1) * (dataloader_idx + 1))


def loader(samples: int, seed: int) -> Any:
    return DataLoader(boring.RandomDataset(4, samples), 2, shuffle=bool(seed))


COLLECTIONS = {
    "list": lambda seed: [loader(6, seed), loader(10, seed)],
    "dict": lambda seed: {"b": loader(10, seed), "a": loader(6, seed)},
    "nested": lambda seed: {"a": [loader(4, seed), loader(8, seed)], "b": (loader(6, seed),)},
    "one": lambda seed: loader(8, seed),
}


@pytest.mark.parametrize("limit", [1.0, 0.5, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", COLLECTIONS)
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", None])
def test_combined_loaders(mode: Any, form: str, limit: Any) -> None:
    def combined(seed: int) -> Any:
        torch.manual_seed(seed)
        made = COLLECTIONS[form](seed)
        return made if mode is None else CombinedLoader(made, mode)

    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, combined(1), combined(0))

    how = {"limit_train_batches": limit, "limit_val_batches": limit}
    ours, theirs = m.compare(OnCombinedLoaders, fit, max_epochs=2, **how)
    assert ours.lightning_module.forms == theirs.lightning_module.forms
    assert ours.num_training_batches == theirs.num_training_batches


def test_loaders_one_after_the_other_are_for_evaluation() -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, loader(8, 1), CombinedLoader(COLLECTIONS["nested"](0), "sequential"))

    m.compare(OnCombinedLoaders, fit, max_epochs=2)
    together = CombinedLoader([loader(4, 0)], "sequential")
    with pytest.raises(TypeError, match="mode='max_size_cycle'"):
        Trainer(**m.arguments()).fit(OnCombinedLoaders(), together)
    with pytest.raises(TypeError, match="mode='sequential'"):
        Trainer(**m.arguments()).predict(OnCombinedLoaders(), CombinedLoader([loader(4, 0)], "min_size"))


def test_the_demonstration_model_of_a_summed_loss() -> None:
    m.compare(boring.DemoModel, with_loader(16, 32, 4))


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wikitext, which the language models download, as a few lines."""

    def write(destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_text(
            "\n".join(f"a {word} is a {word} of the {n % 9}" for n, word in enumerate("bcdefghi" * 40))
        )

    monkeypatch.setattr(transformer.WikiText2, "download", staticmethod(write))


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    "module", [transformer.LightningTransformer, pytest.param(lstm.LightningLSTM, marks=pytest.mark.long)]
)
def test_the_demonstration_language_models(module: Any) -> None:
    m.compare(lambda: module(vocab_size=200), max_epochs=1, limit_train_batches=2)


def schedulers(form: str) -> Any:
    """Return a module whose ``configure_optimizers`` has one of its forms."""

    class Module(m.LitAutoEncoder):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=0.1)
            step = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=0, threshold=0.5)
            return {
                "optimizer": sgd,
                "list": [sgd],
                "two lists": ([sgd], [step]),
                "dict": {"optimizer": sgd, "lr_scheduler": step},
                "configured": {
                    "optimizer": sgd,
                    "lr_scheduler": {"scheduler": step, "interval": "step", "frequency": 2, "name": "mine"},
                },
                "list of dicts": [{"optimizer": sgd, "lr_scheduler": {"scheduler": step}}],
                "plateau": {"optimizer": sgd, "lr_scheduler": plateau, "monitor": "val_loss"},
                "plateau in steps": {
                    "optimizer": sgd,
                    "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss", "interval": "step"},
                },
                "plateau in steps on validation": {
                    "optimizer": sgd,
                    "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "step", "strict": False},
                },
                "several": ([sgd], [step, {"scheduler": plateau, "monitor": "train_loss_epoch"}]),
                "every second epoch": ([sgd], [{"scheduler": step, "frequency": 2}]),
            }[form]

    return Module


@pytest.mark.parametrize(
    "form",
    ["optimizer", "list", "two lists", "dict", "configured", "list of dicts", "plateau", "plateau in steps", "several",
     "every second epoch"],
)  # fmt: skip
def test_every_form_of_configure_optimizers(form: str) -> None:
    m.compare(schedulers(form))


class Unsized(IterableDataset):
    def __iter__(self) -> Any:
        return iter(m.pairs(18, 8, 1))


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned:RuntimeWarning")
@pytest.mark.parametrize("how", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("sized", [True, False])
def test_a_plateau_in_steps_acts_on_the_validation_before_it(how: dict[str, Any], sized: bool) -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, DataLoader(m.pairs(18, 8, 1) if sized else Unsized(), 3))

    m.compare(schedulers("plateau in steps on validation"), fit, **how)


class Even(m.VAE):
    """Batches of one size, which a window weights alike in both."""

    def train_dataloader(self) -> Any:
        return DataLoader(m.pairs(21, 8, 1), batch_size=3, shuffle=True)


@pytest.mark.parametrize(
    "how",
    [
        {"accumulate_grad_batches": 3, "val_check_interval": 2, "limit_train_batches": 6},
        pytest.param(
            {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_train_batches": 6}, marks=pytest.mark.long
        ),
        {"accumulate_grad_batches": 4, "val_check_interval": 1, "limit_train_batches": 4},
        {"accumulate_grad_batches": 2, "val_check_interval": 0.5, "limit_train_batches": 6},
        {
            "accumulate_grad_batches": 3,
            "val_check_interval": 4,
            "check_val_every_n_epoch": None,
            "limit_train_batches": 6,
        },
        {"val_check_interval": 2, "check_val_every_n_epoch": 2},
        {"val_check_interval": "00:00:00:00"},
        {"val_check_interval": {"hours": 1}, "accumulate_grad_batches": 2, "limit_train_batches": 6},
        pytest.param(
            {"accumulate_grad_batches": 2, "check_val_every_n_epoch": 2, "limit_train_batches": 6},
            marks=pytest.mark.long,
        ),
        {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_train_batches": 6, "precision": "bf16-mixed"},
    ],
)
def test_validation_comes_after_the_same_batches(how: dict[str, Any]) -> None:
    m.compare(Even, **how, max_epochs=4)


@pytest.mark.parametrize(
    "how",
    [
        {"overfit_batches": 2},
        {"overfit_batches": 0.5, "val_check_interval": 2},
        {"fast_dev_run": 3},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "num_sanity_val_steps": 5},
    ],
)
def test_parts_of_the_data(how: dict[str, Any]) -> None:
    m.compare(Even, **how)


class DrawsEverywhere(m.VAE):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._reconstruct(batch)

    def predict_dataloader(self) -> Any:
        return DataLoader(m.pairs(7, 8, 4), batch_size=4)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_random_numbers_of_an_evaluation_come_before_those_of_a_fit(verb: str) -> None:
    def fit(trainer: Any, module: Any) -> None:
        quiet = {} if verb == "predict" else {"verbose": False}
        getattr(trainer, verb)(module, **quiet)
        trainer.fit(module)
        getattr(trainer, verb)(module, **quiet)
        module.drawn = torch.rand(1)

    ours, theirs = m.compare(DrawsEverywhere, fit, max_epochs=2)
    assert ours.lightning_module.drawn == theirs.lightning_module.drawn


class NoneSometimes(m.LitAutoEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class NoneOften(Even):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2, 3) else super().training_step(batch, batch_idx)


def test_batches_without_a_loss_count_in_a_window() -> None:
    m.compare(NoneOften, accumulate_grad_batches=2, limit_train_batches=6)


class LastHalfSkipped(m.LitAutoEncoder):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class OwnStep(m.LitAutoEncoder):
    """Warm-up, and a step in every second batch only, as the documentation of ``optimizer_step`` shows them."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 10) * self.hparams.lr


class OwnMethods(m.LitAutoEncoder):
    def backward(self, loss: Any) -> None:
        (loss * 0.5).backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Newton(m.LitAutoEncoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Watchful(m.LitAutoEncoder):
    """Logs in many hooks, with many arguments."""

    def on_train_epoch_start(self) -> None:
        self.log("start", float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("weighted", float(batch_idx), on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("sum", 1.0, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("least", loss, on_epoch=True, reduce_fx="min", sync_dist=True)
        self.log("quiet", 2, logger=False)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.decoder.weight.grad.norm())

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.trainer.callback_metrics["val_loss"] * 2)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["train_loss_epoch"])


@pytest.mark.parametrize("module", [NoneSometimes, LastHalfSkipped, OwnStep, OwnMethods, Watchful])
def test_what_modules_define_themselves(module: Any) -> None:
    m.compare(module)


def test_an_optimizer_that_calls_the_loss_again_logs_each_batch_once() -> None:
    trainer, reference = m.compare(Newton, metrics=False)
    assert trainer.callback_metrics["val_loss"] == pytest.approx(reference.callback_metrics["val_loss"])
    assert trainer.callback_metrics["train_loss_epoch"] != reference.callback_metrics["train_loss_epoch"]


def test_pytorch_lightnings_own_classes() -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(trainer_class: Any) -> Any:
        torch.manual_seed(1)
        module = Module()
        trainer_class(**m.arguments()).fit(module, DataLoader(m.pairs(12, 8, 1), 4))
        return module.layer.weight

    torch.testing.assert_close(run(Trainer), run(pytorch_lightning.Trainer), rtol=0, atol=1e-6)


class Acting(pl.Callback):
    """Acts on the trainer as the second epoch begins."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.act(trainer, pl_module)


def adam(trainer: Any) -> Any:
    groups = [[p for group in each.param_groups for p in group["params"]] for each in trainer.optimizers]
    return [torch.optim.Adam(parameters, 0.01) for parameters in groups]


@pytest.mark.parametrize(
    "act",
    [
        lambda trainer, module: setattr(trainer, "optimizers", adam(trainer)),
        lambda trainer, module: setattr(trainer.strategy, "optimizers", adam(trainer)),
        lambda trainer, module: setattr(trainer.strategy, "lr_scheduler_configs", []),
    ],
)
@pytest.mark.parametrize("module", [boring.BoringModel, m.Accumulating])
def test_optimizers_and_schedulers_set_in_a_hook_are_those_that_train(module: Any, act: Any) -> None:
    m.compare(module, callbacks=[Acting(act)], max_epochs=3, limit_train_batches=4)


@pytest.mark.parametrize(
    "act",
    [
        lambda trainer, module: setattr(trainer, "optimizers", adam(trainer) * 2),
        lambda trainer, module: setattr(trainer, "train_dataloader", []),
        lambda trainer, module: setattr(trainer, "val_check_batch", 2),
        lambda trainer, module: setattr(trainer, "validate_loop", None),
        lambda trainer, module: setattr(trainer.strategy, "precision_plugin", None),
    ],
)
def test_attributes_that_would_have_no_effect_cannot_be_set(act: Any) -> None:
    with pytest.raises(AttributeError, match="cannot be set"):
        m.trained(Trainer, boring.BoringModel, callbacks=[Acting(act)], max_epochs=2, limit_train_batches=2)


def test_a_logger_can_be_replaced_in_a_hook() -> None:
    def act(trainer: Any, module: Any) -> None:
        trainer.logger = None

    trainer = m.trained(Trainer, boring.BoringModel, callbacks=[Acting(act)], max_epochs=2, limit_train_batches=2)[1]
    assert trainer.logger is None
    assert trainer.loggers == []


class SharpnessAware(torch.optim.SGD):
    """Computes gradients again at other weights, if it gets a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        before = [(p, p.clone()) for group in self.param_groups for p in group["params"]]
        for parameter, _ in before:
            parameter.add_(parameter.grad, alpha=0.5)
        with torch.enable_grad():
            closure()
        for parameter, value in before:
            parameter.copy_(value)
        super().step()
        return loss


class Sharp(boring.BoringModel):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.1)


class SharpByOverride(Sharp):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class SharpByHand(Sharp):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.step(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("module", [Sharp, SharpByOverride, SharpByHand])
def test_optimizers_that_compute_gradients_in_their_step_do(module: Any) -> None:
    m.compare(module, max_epochs=2, limit_train_batches=4)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.randn(10, 32, generator=torch.Generator().manual_seed(4)))


class StepsAtTheLastBatch(boring.BoringModel):
    """Manual optimization with a scheduler of epochs, on data without a length."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.step(batch)
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        return {"loss": loss}

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 3)


class SeesTheLastBatch(boring.BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.trainer.is_last_batch)

    train_dataloader = StepsAtTheLastBatch.train_dataloader


def test_the_last_batch_of_data_without_a_length_is_known() -> None:
    m.compare(StepsAtTheLastBatch, max_epochs=3)


@pytest.mark.parametrize("window", [1, 3])
def test_the_last_batch_of_a_window_without_a_length_is_known(window: int) -> None:
    how: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": window, "limit_val_batches": 0}
    ours, theirs = (m.trained(each, SeesTheLastBatch, **how)[0] for each in (Trainer, pl.Trainer))
    assert ours.seen == theirs.seen
    assert ours.seen.count(True) == 2


class StepsEveryThird(boring.BoringModel):
    """Accumulates by its own optimizer_step."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[int] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if (batch_idx + 1) % 3 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called.append(self.trainer.batch_idx if hasattr(self.trainer, "batch_idx") else -1)


class ClosureThenStep(StepsEveryThird):
    """Computes the gradients before it asks for a step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()


class ClipsItself(StepsEveryThird):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.called.append(-2)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


@pytest.mark.parametrize("module", [StepsEveryThird, ClosureThenStep, ClipsItself])
def test_gradients_are_clipped_where_the_modules_own_optimizer_step_steps(module: Any) -> None:
    trainer, reference = m.compare(module, max_epochs=2, limit_train_batches=9, gradient_clip_val=0.05)
    ours, theirs = trainer.lightning_module.called, reference.lightning_module.called
    assert len(ours) == len(theirs) > 0


class TimeFirst(boring.BoringModel):
    """Sequences of shape (time, batch, features), of different lengths."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        batches = [torch.randn(length, 4, 32, generator=generator) for length in (3, 9, 2, 7, 12, 5)]
        return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("window", [2, 3])
def test_the_batches_of_a_window_weigh_alike(window: int) -> None:
    m.compare(TimeFirst, max_epochs=2, accumulate_grad_batches=window)


class Graphs(boring.BoringModel):
    """Batches of nodes and edges, whose first tensor tells the size."""

    def step(self, batch: Any) -> Any:
        return super().step(batch["x"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("of_the_epoch", 2.0)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            [{"x": torch.randn(n, 32, generator=generator), "edges": torch.zeros(2, 2 * n)} for n in (3, 9, 2, 7)], None
        )

    val_dataloader = train_dataloader


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_epoch_means_are_weighted_by_the_first_tensor_and_in_float32(precision: str) -> None:
    how = {"max_epochs": 2, "precision": precision, "num_sanity_val_steps": 0}
    trainer, reference = m.compare(Graphs, metrics=False, **how)
    found, known = trainer.callback_metrics, reference.callback_metrics
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {name: value.item() for name, value in known.items()}, abs=1e-6
    )
    assert found["train_loss_epoch"].dtype == torch.float32


class Nameless:
    """A batch in which no size is found."""

    def __init__(self, x: Any) -> None:
        self.x = x


class OfNoSize(boring.BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch.x)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader([Nameless(torch.ones(2, 32))] * 3, None)


@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
def test_an_epoch_mean_over_batches_of_no_size_is_an_error(trainer_class: Any) -> None:
    with pytest.raises(Exception, match="batch_size=batch_size"):
        m.trained(trainer_class, OfNoSize, limit_val_batches=0)


class Forgets(boring.BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)


def test_a_step_that_returns_nothing_is_warned_of() -> None:  # Lightning warns once in a process
    with pytest.warns(UserWarning, match="returned `?None"):
        m.trained(Trainer, Forgets, max_epochs=1, limit_train_batches=2, limit_val_batches=0)


class Reads(pl.Callback):
    """Notes what the trainer says in hooks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Any, *_: Any, **__: Any) -> None:
        stage = trainer.state.stage
        logged = {name: value.item() for name, value in trainer.logged_metrics.items()}
        self.seen.append(
            (stage and stage.value, trainer.training, trainer.evaluating, trainer.enable_validation, logged)
        )
        self.seen.append(trainer.num_sanity_val_batches)

    setup = on_fit_start = on_sanity_check_start = on_validation_batch_end = on_train_batch_end = note
    on_train_epoch_end = on_validation_end = on_train_start = on_validation_start = note


def test_callbacks_read_the_same_stages_and_values() -> None:
    seen = []
    for trainer_class in (Trainer, pl.Trainer):
        reads = Reads()
        m.trained(trainer_class, m.LitAutoEncoder, callbacks=[reads], max_epochs=2, log_every_n_steps=4)
        seen.append(reads.seen)
    assert len(seen[0]) == len(seen[1])
    for number, (ours, theirs) in enumerate(zip(*seen, strict=True)):
        if isinstance(ours, tuple):
            assert ours[:4] == theirs[:4], number
            assert ours[4] == pytest.approx(theirs[4], abs=1e-6), number
        else:
            assert ours == theirs, number


def test_a_compiled_module_trains() -> None:
    def fit(trainer: Any, module: Any) -> None:
        compiled = torch.compile(module, backend="eager")
        trainer.fit(compiled)
        trainer.validate(compiled, verbose=False)

    with torch._dynamo.config.patch(cache_size_limit=2):  # whatever needs a third graph runs without one
        m.compare(m.LitAutoEncoder, fit, max_epochs=2)


class ReadsGradients(TimeFirst):
    """Gradients within a window are those of its batches so far, divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms.append(self.layer.weight.grad.norm().item())


def test_gradients_within_a_window_have_lightnings_scale() -> None:
    trainer, reference = m.compare(ReadsGradients, max_epochs=1, accumulate_grad_batches=3)
    ours, theirs = trainer.lightning_module.norms, reference.lightning_module.norms
    assert ours == pytest.approx(theirs, abs=1e-5)
