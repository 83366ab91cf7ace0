"""What modules, callbacks and scripts read of the Trainer, and what they log, compared with Lightning's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import modules as m
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from torch.utils.data import DataLoader

import hocket
from hocket_migration.lightning import LightningTask, Trainer


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


class OwnCheckpoint(theirs.ModelCheckpoint):
    pass


class OwnStopping(theirs.EarlyStopping):
    pass


class OwnLosses(m.Losses):
    pass


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("given", "configured"),
    [
        (lambda: [theirs.EarlyStopping("val_loss"), m.Losses()], lambda: [OwnStopping("train_loss")]),
        (lambda: [theirs.EarlyStopping("val_loss"), m.Losses()], lambda: OwnLosses()),
        (lambda: [OwnStopping("val_loss")], lambda: [theirs.EarlyStopping("train_loss")]),
        (lambda: [theirs.EarlyStopping("val_loss")], lambda: [theirs.EarlyStopping("train_loss"), OwnLosses()]),
        (lambda: [m.Losses(), m.Losses()], lambda: [m.Losses()]),
        (lambda: [m.Losses()], lambda: []),
        (lambda: [pl.Callback()], lambda: [m.Losses()]),
    ],
)
def test_callbacks_of_the_module_replace_those_of_their_type_or_a_base(
    given: Any, configured: Any, enabled: bool
) -> None:
    def names(kind: Any) -> list[tuple[str, Any]]:
        class Module(m.LitAutoEncoder):
            def configure_callbacks(self) -> Any:
                made = configured()
                return [*made, OwnCheckpoint(monitor="val_loss")] if enabled and isinstance(made, list) else made

        trainer = kind(**m.arguments(max_epochs=1, callbacks=given(), enable_checkpointing=enabled))
        trainer.fit(Module())
        return [(type(each).__name__, getattr(each, "monitor", None)) for each in trainer.callbacks]

    assert names(Trainer) == names(pl.Trainer)


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
def test_two_callbacks_whose_state_has_one_key_are_refused(kind: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match="state_key"):
        kind(**m.arguments(callbacks=[theirs.Timer(), theirs.Timer()]))


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

    test_dataloader = train_dataloader

    def on_exception(self, exception: BaseException) -> None:
        self.seen = exception, self.trainer.interrupted


class Reads(m.LitAutoEncoder):
    def on_train_start(self) -> None:
        trainer = self.trainer
        with trainer.profiler.profile("x"):
            limits = [getattr(trainer, f"num_{name}_batches") for name in ("training", "val")]
        self.read = [trainer.precision, limits, type(trainer.val_dataloaders).__name__, trainer.interrupted]


def test_modules_read_the_same_of_a_trainer() -> None:
    for others in ({}, {"fast_dev_run": True}, {"fast_dev_run": 2}, {"precision": "bf16-mixed"}):
        read = []
        for kind in (pl.Trainer, Trainer):
            module = Reads()
            kind(**m.arguments(max_epochs=1, **others)).fit(module)
            read.append(module.read)
        assert read[0] == read[1]


@pytest.mark.parametrize("hook", ["on_train_start", "setup", "test_step"])
@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
def test_a_data_module_is_told_of_exceptions(kind: Any, hook: str) -> None:
    def fails(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise OSError("disk")

    module, data = type("Fails", (m.LitAutoEncoder,), {hook: fails})(), Failing()
    trainer = kind(**m.arguments(max_epochs=1))
    with pytest.raises(OSError, match="disk") as raised:
        (trainer.test if hook == "test_step" else trainer.fit)(module, datamodule=data)
    assert data.seen == (raised.value, True)
    assert trainer.interrupted


class Asks(m.LitAutoEncoder):
    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_task_of_a_hocket_trainer_is_given_the_number_of_steps() -> None:
    settings: dict[str, Any] = {"train_data": Asks().train_dataloader(), "duration": "2ep", "device": "cpu"}
    with pytest.raises(ValueError, match="total_steps="):
        hocket.Trainer(model=LightningTask(Asks()), **settings)
    module = Asks()
    hocket.Trainer(model=LightningTask(module, total_steps=12), **settings).fit()
    assert module.total == module.trainer.estimated_stepping_batches == 12


class Rows(pl.loggers.Logger):
    name = version = None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_hyperparams(self, params: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))


class Called(Rows):
    """Notes each call, and the stage of the trainer's module then."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    @property
    def experiment(self) -> None:
        self.calls.append("experiment")

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(("hyperparameters", dict(params)))

    def log_graph(self, model: Any) -> None:
        self.calls.append(("graph", type(model).__name__))

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.calls.append(("metrics", step, sorted(metrics)))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


class Notes(pl.Callback):
    def __init__(self, calls: list[Any]) -> None:
        for hook in ("setup", "on_fit_start", "on_train_start", "on_test_start", "on_fit_end", "teardown"):
            setattr(self, hook, lambda *others, hook=hook, **named: calls.append((hook, *named)))


class WithHyperparameters(m.DigitsDataModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(m.pairs(8, 8, 1), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
    on_after_batch_transfer = pl.LightningDataModule.on_after_batch_transfer


class Predicts(m.LitAutoEncoder):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("data", [None, WithHyperparameters])
def test_loggers_are_called_in_the_same_order(verb: str, data: Any) -> None:
    def record(kind: Any) -> list[Any]:
        calls: list[Any] = []
        given = m.arguments(max_epochs=1, log_every_n_steps=1, callbacks=[Notes(calls)])
        trainer = kind(**given | {"logger": Called(calls)})
        loaders = DataLoader(m.pairs(8, 8, 1), batch_size=4) if data is None else None
        quiet = {"verbose": False} if verb in ("validate", "test") else {}
        getattr(trainer, verb)(Predicts(), loaders, datamodule=data and data(), **quiet)
        return calls

    ours, expected = record(Trainer), record(pl.Trainer)
    assert [each for each in ours if each != "experiment"] == [each for each in expected if each != "experiment"]
    assert ours.index("experiment") < ours.index(("setup", "stage"))


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
def test_hyperparameters_that_differ_are_refused(kind: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"different (values|hyperparameters)"):
        kind(**m.arguments(max_epochs=1) | {"logger": Rows()}).fit(Predicts(), datamodule=WithHyperparameters(lr=3.0))


class LogsMuch(m.LitAutoEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 1:
            self.log("seldom", float(batch_idx), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self._reconstruct(batch)
        if batch_idx % 3 == 0:
            self.log("first", loss, on_step=True)
        self.log("both", loss, on_step=True, on_epoch=True)

    test_step = validation_step


class OwnStep(LogsMuch):
    def on_train_epoch_end(self) -> None:
        self.log_dict({"step": float(self.current_epoch), "per_epoch": 1.0})


class WantsToStop(LogsMuch):
    """Requests a stop that ``min_epochs`` delays; meanwhile each step is logged."""

    def on_train_batch_end(self, *others: Any) -> None:
        self.trainer.should_stop = True


@pytest.mark.parametrize("how", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 1, "limit_train_batches": 4}])
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("kind", [LogsMuch, OwnStep, WantsToStop])
def test_loggers_get_the_same_rows(kind: Any, loaders: int, how: dict[str, Any]) -> None:
    runs = []
    data = [DataLoader(m.pairs(7 + each, 8, each), batch_size=2) for each in range(loaders)]
    for trainer_class in (pl.Trainer, Trainer):
        torch.manual_seed(3)
        trainer = trainer_class(
            **m.arguments(min_epochs=1, max_epochs=2, log_every_n_steps=2, **how) | {"logger": (rows := Rows())}
        )
        trainer.fit(module := kind(), module.train_dataloader(), data)
        logged = [trainer.logged_metrics, trainer.callback_metrics, trainer.progress_bar_metrics]
        trainer.test(module, data, verbose=False)
        logged += [trainer.logged_metrics, trainer.callback_metrics, trainer.progress_bar_metrics]
        runs.append((rows.rows, [{name: float(value) for name, value in each.items()} for each in logged]))
    assert [(step, sorted(row)) for step, row in runs[1][0]] == [(step, sorted(row)) for step, row in runs[0][0]]
    for (_, ours), (_, expected) in zip(runs[1][0], runs[0][0], strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)
    for ours, expected in zip(runs[1][1], runs[0][1], strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("hook", ["on_fit_start", "setup", "configure_optimizers"])
def test_logging_in_a_hook_that_does_not_allow_it_says_so(hook: str) -> None:
    def logs(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.log("a", 1.0)

    for kind in (pl.Trainer, Trainer):
        with pytest.raises(Exception, match=rf"{hook}"):
            kind(**m.arguments(max_epochs=1)).fit(type("Logs", (m.LitAutoEncoder,), {hook: logs})())


class Zero(m.LitAutoEncoder):
    def _reconstruct(self, batch: Any) -> Any:
        return sum((each**2).sum() for each in self.parameters())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._reconstruct(batch)


def test_loaded_weights_are_evaluated_and_not_an_average(tmp_path: Path) -> None:
    trainer = Trainer(**m.arguments(max_epochs=2), hocket={"algorithms": ["ema"]})
    trainer.fit(module := Zero())
    data = module.val_dataloader()

    def measured(**how: Any) -> list[float]:
        return [
            trainer.validate(module, data, verbose=False, **how)[0]["val_loss"],
            trainer.test(module, data, verbose=False, **how)[0]["test_loss"],
            trainer.predict(module, data, **how)[0].item(),
        ]

    averages = trainer.hocket.model_state_dict(evaluated=True).values()
    average = float(sum((each**2).sum() for each in averages))
    assert measured() == pytest.approx([average] * 3, rel=1e-5)
    own = float(module._reconstruct(None))
    assert own != pytest.approx(average, rel=1e-3)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert measured(ckpt_path=tmp_path / "own.ckpt") == pytest.approx([own] * 3, rel=1e-5)
    for each in module.parameters():
        each.data.zero_()
    assert measured() == [0.0] * 3
