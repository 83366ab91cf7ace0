"""Lightning's Trainer, run by hocket: the same arguments and methods."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import hocket
from hocket.basics.run_folder import is_url
from hocket.errors import WrongType
from hocket_migration.lightning import arguments, callbacks, checkpoint, data, loggers
from hocket_migration.lightning.evaluation import PredictLoop
from hocket_migration.lightning.fit_data import LoadingTrainer
from hocket_migration.lightning.installed_lightning import framework_of_any, overrides, require, unwrapped
from hocket_migration.lightning.prepare_data import prepare
from hocket_migration.lightning.task import LightningTask
from hocket_migration.lightning.training import check_trains
from hocket_migration.lightning.validation_times import Check

P = ParamSpec("P")
R = TypeVar("R")


def _interruptible(method: Callable[Concatenate[Trainer, P], R]) -> Callable[Concatenate[Trainer, P], R]:
    """Let callbacks, the data module and loggers know of an exception in a call of the Trainer."""

    @functools.wraps(method)
    def call(self: Trainer, /, *given: P.args, **named: P.kwargs) -> R:
        try:
            return method(self, *given, **named)
        except BaseException as error:
            self.interrupt(error)
            for logger in self.loggers:
                logger.finalize("failed")
            self.state.stage = None
            raise

    return call


def _checked(method: Callable[Concatenate[Trainer, P], R]) -> Callable[Concatenate[Trainer, P], R]:
    """Raise TypeError for arguments of other names, with the nearest."""
    known = [each for each in inspect.signature(method).parameters if each != "self"]

    @functools.wraps(method)
    def call(self: Trainer, /, *given: P.args, **named: P.kwargs) -> R:
        for name in named.keys() - {*known}:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            raise WrongType(
                f"{method.__name__}({name}=…) is not an argument. "
                + (f"Did you mean {near[0]}=?" if near else f"Known are {', '.join(known)}.")
            )
        return method(self, *given, **named)

    return call


class Trainer(LoadingTrainer):
    """Train an unmodified LightningModule with hocket: change ``from lightning import Trainer`` to this class.

    It takes the arguments of Lightning's Trainer by their names, and refuses by name those that hocket has no counterpart
    for. `hocket` is the `hocket.Trainer` of the latest call, to go on from there.

    Args:
        hocket: arguments of `hocket.Trainer`, which win over translated ones, such as ``{"algorithms": ["ema"],
            "checkpoints": "runs/a"}``.
        accelerator, strategy, devices, precision: those that hocket has; another strategy or precision of hocket's is given in
            ``hocket``.
        logger: Lightning's loggers, which get the same rows; None and True for Lightning's default, False for none.
        callbacks: Lightning's callbacks. Those that reach into Lightning's loop are refused, with what to write instead.

    The other arguments are Lightning's: ``docs/reference/drop-in-lightning.md`` lists them all.

    Raises:
        TypeError, ValueError: an argument is unknown, invalid or has no counterpart; the message says what to write.
        ModuleNotFoundError: Lightning is not installed.

    Example:
        >>> from hocket_migration.lightning import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = Trainer(max_epochs=1, logger=False, hocket={"algorithms": ["ema"]})
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step, trainer.hocket.state.timestamp.epoch
        (64, 1)
    """

    evaluation_draws = True
    _made = _fits = False

    def __init__(self, *, hocket: Mapping[str, Any] | None = None, **given: Any) -> None:
        framework = require()
        known = {
            name: parameter.default
            for name, parameter in inspect.signature(framework.Trainer.__init__).parameters.items()
            if name not in ("self", "suggest_integrations") and parameter.kind is parameter.KEYWORD_ONLY
        }
        for name in given:
            if name not in known:
                raise WrongType(arguments.unknown(name, known))
        self._given = known | arguments.of_environment(framework, known) | given
        super().__init__()
        self._extra = arguments.checked_hocket(hocket)
        self._translated = arguments.translated(self._given)
        self._set_attributes()
        self._connect(framework_of_any([self._given["callbacks"], self._given["logger"]]) or framework)
        self._fitted = False
        #: Identifies the weights at the end of the fit, which algorithms such as EMA replace in evaluations; None for no fit.
        self._fitted_weights: Any = None
        self.predict_loop = PredictLoop()
        if self._given["benchmark"] is not None:
            import torch

            torch.backends.cudnn.benchmark = bool(self._given["benchmark"])
        self._made = True

    def _set_attributes(self) -> None:
        """Set what modules read under the names of arguments."""
        given = self._given
        self.fast_dev_run = given["fast_dev_run"]
        self.overfit_batches = given["overfit_batches"]
        self.log_every_n_steps = 50 if given["log_every_n_steps"] is None else given["log_every_n_steps"]
        self.accumulate_grad_batches = given["accumulate_grad_batches"]
        self.gradient_clip_val = given["gradient_clip_val"]
        self.gradient_clip_algorithm = given["gradient_clip_algorithm"]
        self.check_val_every_n_epoch = given["check_val_every_n_epoch"]
        self.val_check_interval = 1.0 if given["val_check_interval"] is None else given["val_check_interval"]
        for name in ("train", "val", "test", "predict"):
            limit = given[f"limit_{name}_batches"]
            limit = int(self.fast_dev_run) if self.fast_dev_run else 1.0 if limit is None else limit
            if name in ("train", "val") and self.overfit_batches:
                limit = self.overfit_batches
            setattr(self, f"limit_{name}_batches", limit)
        sanity = given["num_sanity_val_steps"]
        self.num_sanity_val_steps = 2 if sanity is None else math.inf if sanity == -1 else sanity
        self.default_root_dir = os.fspath(given["default_root_dir"] or Path.cwd())
        self.min_epochs, self.min_steps = given["min_epochs"], given["min_steps"]
        if self.fast_dev_run:
            self.num_sanity_val_steps, self.log_every_n_steps = 0, 1
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1

    def change(self, name: str, value: Any) -> None:
        """Change an argument from the next call on, and the number of epochs at once.

        Raises AttributeError for others during a fit, or if it cannot be changed.
        """
        if name == "_skip_backward":
            self.skips_backward = bool(value)
            return
        if name == "max_batches" and self._fits:
            self.max_batches = value
            return
        if self._fits and name == "accumulate_grad_batches" and (self.skips_backward or value == self._given[name]):
            return
        if self._fits and name == "max_epochs" and "duration" not in self._extra:
            self._given, self.epochs_changed = self._given | {name: value}, True
            if self._task is not None:
                self._task.plan_epochs()
            return
        if name not in self._given:
            raise AttributeError(f"{name} of Lightning's loops cannot be set under hocket. Omit it.")
        if self._fits:
            raise AttributeError(
                f"{name} cannot be set during a fit: hocket has planned it. Write Trainer({name}={value!r}), or set it before."
            )
        given = self._given | {name: value}
        self._translated, self._given = arguments.translated(given), given

    def _connect(self, framework: Any) -> None:
        """Make callbacks and loggers of a package of Lightning."""
        self.adopt(framework)
        if self._own_profiler:
            self.profiler = self._given["profiler"]
        given, writes = self._given, "checkpoints" in self._extra
        self.callbacks = callbacks.made(given, framework, others_write=writes)
        self.loggers = loggers.made(given["logger"], framework, given["fast_dev_run"], self.default_root_dir)

    @property
    def _own_profiler(self) -> bool:
        """Whether a profiler of Lightning's was given, which measures the blocks that modules name.

        hocket's profiles the steps, and stands for Lightning's own of torch: there is one at a time.
        """
        given = self._given["profiler"]
        return arguments.is_profiler(given) and not arguments.is_profiler(given, "PyTorchProfiler")

    # --- what Lightning's Trainer does

    @_checked
    @_interruptible
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train. Data comes from the loaders, the data module or the module's own methods.

        Args:
            ckpt_path: a ``.ckpt`` file to continue from, or ``"last"``, ``"best"``.
            weights_only: False to unpickle any object in it.
        """
        train_dataloaders, datamodule = data.one_of(train_dataloaders, datamodule)
        model = unwrapped(model)
        check_trains(model, "optimizer" not in self._extra)
        # known in `setup`, which may ask for the number of batches
        self._train_source = lambda: self._loaders("train_dataloader", train_dataloaders)
        self._train_data = None
        self._val_source = val_dataloaders
        self._begin("FITTING", model, datamodule)
        saved = checkpoint.named(self, ckpt_path, weights_only)
        if saved is not None:
            checkpoint.restore_weights(self, saved)
        self._validates = self.enable_validation
        task = self._build(fits=True)
        self._fits = True
        self.skips_backward, self.max_batches, self.epochs_changed = False, None, False
        run = self.run_state
        assert run is not None
        resumes = any(self._extra.get(each) is not None for each in ("checkpoints", "resume"))
        callbacks.check_averaging(self.callbacks, shards=task.shards, resumes=resumes)
        if task.shards:
            checkpoint.check_writers(self, self._given)
        if saved is not None:
            checkpoint.restore_callbacks(self, saved)
            task.begin_fit(run)  # whose hooks may add the groups of parameters that the checkpoint's optimizers have
            checkpoint.restore_training(self, saved)
        elif self._fitted:  # a Trainer counts on from one fit to the next, as Lightning's does
            run.timestamp.epoch, run.timestamp.batch = self.current_epoch, self.batches_that_stepped
            run.previous.become(run.timestamp)
        task.begin_fit(run)
        self._log_hyperparameters()
        evaluated = self._fit_loaders(task)
        task.omits_training = not self._trains()
        every = Check(self, lambda: task.skips)
        task.check = None if self.fast_dev_run else every
        loaders = self._validation_sets(evaluated)
        sets = {label: hocket.EvalSet(each, every=every) for label, each in loaders.items()} or None
        task.set_labels = list(data.labelled(evaluated, "val_dataloader"))
        try:
            if task.omits_training:  # only the sanity check, and the hooks of a fit
                self.hocket.fit([None], sets, duration="1ep")
            else:
                self.hocket.fit(self._train_batches(), sets)
        finally:
            self._fits = False
        self._fitted = True
        self._fitted_weights = self._fingerprint()
        self._end()

    @_checked
    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Return the values that ``validation_step`` logs, a dict for each loader."""
        return self._evaluate(
            "validation", "validate", model, dataloaders, ckpt_path, verbose, datamodule, weights_only
        )

    @_checked
    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Return the values that ``test_step`` logs, a dict for each loader."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @_checked
    @_interruptible
    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returns for each batch, a list for each loader if there are several."""
        dataloaders, datamodule = data.one_of(dataloaders, datamodule)
        task = self._begin_again("PREDICTING", "predict", model, datamodule, ckpt_path, weights_only)
        if self.limit_predict_batches == 0:
            self._end()
            return None
        self.keep(predict_dataloaders=self._loaders("predict_dataloader", dataloaders))
        loaders = data.prediction(self.predict_dataloaders, self.framework)
        self.num_predict_batches = [data.limited(each, self.limit_predict_batches) for each in loaders]
        if not any(self.num_predict_batches):
            self._end()
            return None
        found, before = [], task.set_labels
        task.set_labels = list(data.labelled(loaders, "predict_dataloader"))
        keep = return_predictions is not False
        writers = self._of_kind("BasePredictionWriter")
        self.predict_loop = task.predict_loop = PredictLoop(
            loaders, keep or any(each.interval.on_epoch for each in writers)
        )
        with self._weights():
            for number, loader in enumerate(loaders):
                task._set = number
                found.append(self.hocket.predict(data.bounded(loader), keep=keep))
                task.continue_random_numbers()
        task.set_labels, task.predict_loop = before, None
        self._end()
        if not keep:
            self.predict_loop.forget()
            return None
        return found[0] if len(found) == 1 else found

    @_interruptible
    def _evaluate(
        self,
        kind: str,
        verb: str,
        model: Any,
        loaders: Any,
        ckpt_path: Any,
        verbose: bool,
        datamodule: Any,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        loaders, datamodule = data.one_of(loaders, datamodule)
        function = "TESTING" if kind == "test" else "VALIDATING"
        task = self._begin_again(function, verb, model, datamodule, ckpt_path, weights_only)
        name = "test_dataloader" if kind == "test" else "val_dataloader"
        limit = self.limit_test_batches if kind == "test" else self.limit_val_batches
        if limit == 0:
            self._end()
            return []
        loaders = self._loaders(name, loaders)
        given = data.evaluation(loaders, self.framework)
        counts = [data.limited(each, limit) for each in given]
        if kind == "test":
            self.keep(test_dataloaders=loaders)
            self.num_test_batches = counts
        else:
            self.keep(val_dataloaders=loaders)
            self.num_val_batches = counts
        labels = data.labelled(given, name)
        sets = self._not_empty(labels, counts, limit)
        if not sets:
            self._end()
            return []
        task.evaluates, before, task.set_labels = kind, task.set_labels, list(labels)
        try:
            task.check_evaluation()
            with self._weights():
                self.hocket.evaluate(sets)
            task.continue_random_numbers()
        finally:
            task.evaluates, task.set_labels = "validation", before
        self._end()
        if verbose and self.is_global_zero:
            for label, values in zip(labels, task.evaluated, strict=True):
                for metric, value in values.items():
                    print(f"{verb} {label}  {metric}  {value:g}")
        return task.evaluated

    # --- the parts of a call

    def _begin(self, function: str, model: Any, datamodule: Any) -> None:
        """Connect module and data module, prepare the data and call ``setup`` and ``configure_model``."""
        self.run_state, before = None, self.framework
        self._fits = False
        callbacks.refuse(self.callbacks)
        self.attach(model)
        framework = self.framework
        if datamodule is not None and not isinstance(datamodule, framework.LightningDataModule):
            raise WrongType(
                f"datamodule={type(datamodule).__name__}(…) is not a LightningDataModule of {framework.__name__}. A "
                "hocket.data.DataModule is given to hocket.Trainer(model=LightningTask(module), data=…)."
            )
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self
        if framework is not before:
            self._connect(framework)
        self.forget_values()
        self.enter(function, "TRAINING" if function == "FITTING" else function)
        if self._own_profiler:
            self.profiler.setup(stage=self.state.fn, local_rank=self.local_rank, log_dir=self.log_dir)
        of_module = self.hooks.module("configure_callbacks")
        self.callbacks = callbacks.merged(self.callbacks, of_module, framework)
        for each in self.callbacks:
            each.log, each.log_dict = model.log, model.log_dict
        prepare([each for each in (datamodule, model) if each is not None])
        for logger in self.loggers:
            getattr(logger, "experiment", None)  # made before `setup`, which may use it
        if datamodule is not None:
            datamodule.setup(stage=self.state.fn)
        self.hooks.callbacks("setup", stage=self.state.fn)
        self.hooks.module("setup", stage=self.state.fn)
        if overrides(model, "configure_model", framework.LightningModule):
            self.hooks.module("configure_model")

    def _begin_again(
        self, function: str, verb: str, model: Any, datamodule: Any, ckpt_path: Any, weights_only: bool | None
    ) -> LightningTask:
        """Begin an evaluation or prediction, with the run of an earlier call if it is of the same module."""
        model = unwrapped(model)
        same = self._task is not None and (model is None or model is self._task.model)
        if model is None and not same:
            raise WrongType(f"trainer.{verb}() has no module. Give one: trainer.{verb}(module, loader).")
        run, task, kept = self.run_state, self._task, self.hocket
        if datamodule is None and same:
            datamodule = self.datamodule
        self._begin(function, self.lightning_module if same else model, datamodule)
        best = getattr(self.checkpoint_callback, "best_model_path", None)
        if model is None and ckpt_path is None and best:
            ckpt_path = "best"  # as Lightning does, if no module is given
        saved = checkpoint.named(self, ckpt_path, weights_only)
        if saved is not None:
            checkpoint.restore_weights(self, saved)
            checkpoint.restore_callbacks(self, saved)
        if same:
            self.run_state, self.hocket = run, kept
            assert task is not None
            if saved is not None:
                self._fitted_weights = None
        else:
            task = self._build(fits=False)
            self._fitted_weights = self._fingerprint()
        self._log_hyperparameters()
        return task

    def _log_hyperparameters(self) -> None:
        if self.loggers and self._given["enable_autolog_hparams"] and self.is_global_zero:
            loggers.log_hyperparameters(self.loggers, self.lightning_module, self.datamodule)

    def _fingerprint(self) -> Any:
        """Return numbers that change with the weights, where an algorithm evaluates others; else None."""
        import torch

        run = self.run_state
        if run is None or not any(each.kind == "algorithms" for each in run.bus.listeners("predict_start")):
            return None
        shards = [getattr(each, "to_local", lambda each=each: each)() for each in self.lightning_module.parameters()]
        numbers = [each.detach() if each.device.type == "mps" else each.detach().double() for each in shards]
        return torch.stack([value.cpu() for each in numbers for value in (each.norm(), each.sum())])

    def _weights(self) -> AbstractContextManager[None]:
        """Return a context in which the module's own weights are evaluated, if they are others than those of the fit."""
        now, fitted = self._fingerprint(), self._fitted_weights
        if now is None or (fitted is not None and bool((now == fitted).all())):
            return nullcontext()
        assert self.run_state is not None
        return self.run_state.bus.without("algorithms")

    def _build(self, *, fits: bool) -> LightningTask:
        """Make the hocket.Trainer of this call."""
        self._task = task = LightningTask(self.lightning_module, trainer=self)
        task.optimizes = fits
        if fits and self._train_data is not None:
            task.unpack = self._unpack
        settings = dict(self._translated)
        if fits and self._validates:
            settings["sanity_eval"] = 2**31 if self.num_sanity_val_steps == math.inf else self.num_sanity_val_steps
        self.ends_by_steps = fits and not self.lightning_module.automatic_optimization and self.max_steps != -1
        if self.ends_by_steps:
            settings["duration"] = arguments.duration(self._given, steps_are_batches=False)
        if not self.lightning_module.automatic_optimization and not self.min_epochs:
            settings.pop("min_duration", None)
        self.ends_by_steps &= "duration" not in self._extra
        if not is_url(self.default_root_dir):
            settings["folder"] = str(Path(self.default_root_dir) / "runs")
        if self._reloads:
            settings.pop("limit_train", None)  # each of the loaders is limited by itself
        if self._given["enable_progress_bar"] is not False and fits:
            settings["loggers"] = ["progress"]
        if self.fast_dev_run or "overfit" in self._extra:
            settings.pop("sanity_eval", None)
        self.hocket = hocket.Trainer(model=task, **(settings | self._extra))
        return task

    def _end(self) -> None:
        """Call ``teardown``."""
        stage = self.state.fn
        if self.datamodule is not None:
            self.datamodule.teardown(stage=stage)
        self.hooks.callbacks("teardown", stage=stage)
        self.hooks.module("teardown", stage=stage)
        if self._own_profiler:
            self.profiler.describe()
            self.profiler.teardown(stage=stage)
        for logger in self.loggers:
            logger.finalize("success")
        self.state.status = self._states.TrainerStatus.FINISHED
        self.state.stage = None
