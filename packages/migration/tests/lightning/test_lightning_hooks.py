"""Hooks of modules and callbacks come in the order in which Lightning calls them; both are recorded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch.utils.data import DataLoader

import hocket
from hocket_migration.lightning import LightningTask, Trainer

_BEGINNINGS = (
    "on_", "training_step", "validation_step", "test_step", "predict_step", "configure_", "optimizer_", "lr_scheduler_step",
    "backward", "transfer_", "setup", "teardown", "prepare_data", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader",
)  # fmt: skip
OF_MODULES = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith(_BEGINNINGS) and name not in ("on_gpu", "configure_sharded_model")
]
OF_CALLBACKS = [name for name in dir(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


def recording(base: type, calls: list[str], names: list[str]) -> Any:
    """Return a subclass that notes each call of these methods, and what they were called with."""

    def noted(name: str) -> Any:
        def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
            shown = [each for each in (*arguments, *keywords.values()) if isinstance(each, int | str)]
            calls.append(f"{base.__name__}.{name}{shown or ''}")
            return getattr(super(kind, self), name)(*arguments, **keywords)

        return method

    kind = type(base.__name__, (base,), {name: noted(name) for name in names})
    return kind


def recorded(
    trainer_class: Any, base: Any, run: Any, names: list[str], callbacks: Any = (), **others: Any
) -> list[str]:
    torch.manual_seed(1)
    calls: list[str] = []
    present = [
        name
        for name in names
        if "_dataloader" not in name or getattr(base, name) is not getattr(pl.LightningModule, name)
    ]
    module = recording(base, calls, present)()
    callback = recording(pl.Callback, calls, OF_CALLBACKS)()
    settings = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_predict_batches": 2, "limit_test_batches": 2}
    run(
        trainer_class(**m.arguments(callbacks=[callback, *callbacks], **({"max_epochs": 2} | settings | others))),
        module,
    )
    return calls


class Evaluates(m.LitAutoEncoder):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()


def fits(trainer: Any, module: Any) -> None:
    trainer.fit(module)


def fits_twice(trainer: Any, module: Any) -> None:
    trainer.fit(module)
    trainer.fit(module)


def fits_nothing(trainer: Any, module: Any) -> None:
    trainer.fit(module, DataLoader(m.pairs(0, 8, 1), 4))


def validates_nothing(trainer: Any, module: Any) -> None:
    assert trainer.validate(module, DataLoader(m.pairs(0, 8, 1), 4), verbose=False) == []


def validates(trainer: Any, module: Any) -> None:
    assert trainer.validate(module, verbose=False) == []


def evaluates_on_test_data(trainer: Any, module: Any) -> None:
    assert trainer.test(module, verbose=False) == []


def predicts(trainer: Any, module: Any) -> None:
    assert trainer.predict(module) is None


@pytest.mark.parametrize(
    ("run", "limits"),
    [
        (fits, {"max_epochs": 0}),
        (fits, {"max_steps": 0}),
        (fits, {"max_epochs": 0, "limit_val_batches": 0}),
        (fits, {"max_time": {"seconds": 0}}),
        (fits, {"limit_train_batches": 0}),
        (fits, {"limit_train_batches": 0.0, "val_check_interval": 0.5}),
        (fits, {"limit_val_batches": 0}),
        (fits, {"val_check_interval": 0.0}),
        (fits_twice, {}),
        (fits_nothing, {}),
        (validates_nothing, {}),
        (validates, {"limit_val_batches": 0}),
        (evaluates_on_test_data, {"limit_test_batches": 0.0}),
        (predicts, {"limit_predict_batches": 0}),
    ],
)
def test_with_nothing_to_do_the_same_hooks_are_called(run: Any, limits: dict[str, Any]) -> None:
    ours, theirs = (recorded(kind, Evaluates, run, OF_MODULES, **limits) for kind in (Trainer, pl.Trainer))
    assert without_loaders(ours) == without_loaders(theirs)
    assert sorted(ours) == sorted(theirs)


class Stops(pl.Callback):
    """Requests a stop in the given call of a hook."""

    def __init__(self, hook: str, call: int) -> None:
        self.left = call
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, *others: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.should_stop = True


@pytest.mark.parametrize(
    "least",
    [
        {},
        {"min_epochs": 2},
        {"min_steps": 5},
        *(
            pytest.param(least, marks=pytest.mark.long)
            for least in ({"min_steps": 3}, {"min_steps": 5, "min_epochs": 2}, {"min_epochs": 0})
        ),
    ],
)
@pytest.mark.parametrize(
    ("hook", "call"),
    [("on_fit_start", 1), ("on_train_start", 1), ("on_train_epoch_start", 2), ("on_train_batch_start", 2),
     ("on_before_backward", 3), ("on_train_batch_end", 4), ("on_validation_end", 2), ("on_train_epoch_end", 1)],
)  # fmt: skip
@pytest.mark.parametrize("module", [Evaluates, m.GAN])
def test_a_fit_that_shall_stop_ends_and_validates_with_the_same_hooks(
    module: Any, hook: str, call: int, least: dict[str, Any]
) -> None:
    def record(kind: Any) -> list[str]:
        stops = Stops(hook, call)
        return recorded(kind, module, fits, OF_MODULES, limit_train_batches=4, max_epochs=3, callbacks=[stops], **least)

    ours, theirs = record(Trainer), record(pl.Trainer)
    assert without_loaders(ours) == without_loaders(theirs)


OWN_STEPS = ["optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"]
CASES = {
    "fit": (BoringModel, lambda trainer, module: trainer.fit(module), {}),
    "without sanity check": (BoringModel, lambda trainer, module: trainer.fit(module), {"num_sanity_val_steps": 0}),
    "manual": (ManualOptimBoringModel, lambda trainer, module: trainer.fit(module), {}),
    "several optimizers": (m.GAN, lambda trainer, module: trainer.fit(module), {}),
    "every second epoch": (BoringModel, lambda trainer, module: trainer.fit(module), {"check_val_every_n_epoch": 2}),
    "within epochs": (BoringModel, lambda trainer, module: trainer.fit(module), {"val_check_interval": 1}),
    "validate": (BoringModel, lambda trainer, module: trainer.validate(module, verbose=False), {}),
    "test": (BoringModel, lambda trainer, module: trainer.test(module, verbose=False), {}),
    "predict": (BoringModel, lambda trainer, module: trainer.predict(module), {}),
}


@pytest.mark.parametrize("own_steps", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_hooks_come_in_lightnings_order(case: str, own_steps: bool) -> None:
    base, run, others = CASES[case]
    names = OF_MODULES if own_steps else [name for name in OF_MODULES if name not in OWN_STEPS]
    ours = recorded(Trainer, base, run, names, **others)
    theirs = recorded(pl.Trainer, base, run, names, **others)
    assert len(ours) > 10
    # hocket has all data before a fit begins, and Lightning asks for it as it goes.
    assert without_loaders(ours) == without_loaders(theirs)
    assert sorted(ours) == sorted(theirs)


def without_loaders(calls: list[str]) -> list[str]:
    return [each for each in calls if "_dataloader" not in each]


@pytest.mark.parametrize("interval", [1.0, 1, 3])
def test_accumulation_loads_the_window_first_and_keeps_the_order_of_each_batch(interval: Any) -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module)

    names = [name for name in OF_MODULES if "transfer" not in name and name != "optimizer_step"]
    how = {"accumulate_grad_batches": 2, "val_check_interval": interval, "limit_train_batches": 4}
    ours, theirs = (recorded(kind, BoringModel, fit, names, **how) for kind in (Trainer, pl.Trainer))
    assert without_loaders(ours) == without_loaders(theirs)


class NoneOften(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2, 3) else super().training_step(batch, batch_idx)


def test_batches_without_a_loss_have_the_same_hooks() -> None:
    how = {"accumulate_grad_batches": 2, "limit_train_batches": 6}
    names = [name for name in OF_MODULES if "transfer" not in name and name not in OWN_STEPS]
    ours, theirs = (recorded(kind, NoneOften, fits, names, **how) for kind in (Trainer, pl.Trainer))
    assert without_loaders(ours) == without_loaders(theirs)


def test_the_adapter_calls_the_same_hooks_in_a_trainer_of_hocket() -> None:
    calls: list[str] = []
    module = recording(BoringModel, calls, OF_MODULES)()
    data = DataLoader(torch.randn(4, 32), 2)
    trainer = hocket.Trainer(
        model=LightningTask(module), train_data=data, eval_data=data, duration="2ep", device="cpu", limit_eval=1
    )
    trainer.fit()

    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, data, data)

    theirs = recorded(pl.Trainer, BoringModel, fit, OF_MODULES, num_sanity_val_steps=0)
    theirs = [each for each in theirs if each.startswith("Boring") and "setup" not in each]
    theirs = [
        each for each in theirs if not any(n in each for n in ("prepare_data", "teardown", "configure_callbacks"))
    ]
    theirs = [each for each in theirs if "configure_model" not in each]
    assert [each for each in calls if "setup" not in each and "configure_model" not in each] == theirs
