"""What a LightningModule and its callbacks read of ``self.trainer``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import WrongType, WrongValue
from hocket_migration.lightning.hook_calls import Hooks
from hocket_migration.lightning.installed_lightning import framework_of
from hocket_migration.lightning.logged_values import Results
from hocket_migration.lightning.strategy import StrategyView
from hocket_migration.lightning.trainer_attributes import Changes
from hocket_migration.lightning.trainer_internals import BatchProgress, Clipping, Connector, Loop

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_migration.lightning.optimizers import SchedulerConfig


class TrainerView(Changes):
    """The ``trainer`` of a module that hocket trains.

    `hocket_migration.lightning.Trainer` is one; a `LightningTask` that was given to a `hocket.Trainer` makes its own.
    """

    #: Whether a fit ends after `max_steps` optimizer steps, which manual optimization takes as it likes.
    ends_by_steps = False
    #: Whether a fit has begun, whose data and duration are known.
    begun = False
    # What Lightning's own Trainer has under these names; a subclass sets them from its arguments.
    barebones = False
    fast_dev_run: int | bool = False
    overfit_batches: int | float = 0.0
    log_every_n_steps = 1
    accumulate_grad_batches = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Any = None
    check_val_every_n_epoch: int | None = 1
    val_check_interval: int | float | None = 1.0
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    num_sanity_val_steps: int | float = 0
    default_root_dir = "."
    min_epochs: int | None = None
    min_steps: int | None = None
    ckpt_path: str | None = None
    progress_bar_callback = None
    profiler: Any = None
    received_sigterm = False
    train_dataloader: Any = None
    val_dataloaders: Any = None
    test_dataloaders: Any = None
    predict_dataloaders: Any = None
    #: Lightning's TrainerState.
    state: Any = None

    def __init__(self, module: Any = None, callbacks: Sequence[Any] = (), loggers: Sequence[Any] = ()) -> None:
        self.framework: Any = None
        self.lightning_module: Any = None
        self.model: Any = None
        self.callbacks: list[Any] = list(callbacks)
        self.loggers: list[Any] = list(loggers)
        self.datamodule: Any = None
        #: The hocket.Trainer, once there is one.
        self.hocket: Any = None
        #: The state of hocket's run, once it begins.
        self.run_state: State | None = None
        self.strategy = StrategyView(self)
        self.precision_plugin = Clipping()
        self._logger_connector = Connector(self)
        self._accelerator_connector = SimpleNamespace(is_distributed=False)
        #: The values of the current loop that ``self.log`` writes to; None where it may not.
        self._results: Results | None = None
        self._callback_metrics: dict[str, Any] = {}
        self._logged_metrics: dict[str, Any] = {}
        self._progress_bar_metrics: dict[str, Any] = {}
        #: Optimizer steps so far, and the batches after which one was due.
        self.global_step = 0
        self.batches_that_stepped = 0
        #: The batches of the current epoch, and those since the beginning.
        self.batch_idx = -1
        self.total_batch_idx = -1
        self.current_epoch = 0
        self._should_stop = False
        self._raised: BaseException | None = None
        self.num_training_batches: int | float = math.inf
        self.num_val_batches: list[int | float] = []
        self.num_test_batches: list[int | float] = []
        self.num_predict_batches: list[int | float] = []
        self.keep(train_dataloader=None, val_dataloaders=None, test_dataloaders=None, predict_dataloaders=None)
        #: The loaded batches, of an accumulation window, that follow the current one.
        self.batches_loaded = 0
        #: Whether an epoch has begun, whether its batches are over, and whether ``on_train_batch_end`` is called for one.
        self.epoch_begun = self.epoch_processed = self.batch_ending = False
        #: Batches, or windows of them, at the beginning of the epoch that were trained on before a checkpoint.
        self.batches_to_skip = 0
        if module is not None:
            self.attach(module)

    def attach(self, module: Any) -> None:
        """Make this the module's ``trainer``. Raises TypeError if it is not a LightningModule."""
        self.adopt(framework_of(module))
        self.lightning_module = self.model = module
        self._results = Results()  # `self.log` says in which hooks it can be called
        self.hooks = Hooks(module, self)
        module.trainer = self

    def adopt(self, framework: Any) -> None:
        """Use the state and the profiler of a package of Lightning."""
        if framework is not self.framework:
            self.framework = framework
            self._states = importlib.import_module(f"{framework.__name__}.trainer.states")
            self.state = self._states.TrainerState()
            self.profiler = framework.profilers.PassThroughProfiler()
            data = importlib.import_module(f"{framework.__name__}.utilities.data")
            self.batch_size_of = data.extract_batch_size

    # --- stages

    def enter(self, function: str, stage: str | None) -> None:
        """Set ``trainer.state``, by the names of Lightning's enumerations."""
        self.state.fn = self._states.TrainerFn[function]
        self.state.stage = None if stage is None else self._states.RunningStage[stage]
        self.state.status = self._states.TrainerStatus.RUNNING

    @property
    def interrupted(self) -> bool:
        """Whether an exception has ended the latest call."""
        return self.state.status == self._states.TrainerStatus.INTERRUPTED

    def interrupt(self, error: BaseException) -> None:
        """Call ``on_exception`` of callbacks and of the data module, once for an exception."""
        if error is self._raised or self.lightning_module is None:
            return
        self._raised = error
        self.state.status = self._states.TrainerStatus.INTERRUPTED
        self.hooks.callbacks("on_exception", error)
        if self.datamodule is not None:
            self.datamodule.on_exception(error)

    def _is(self, stage: str) -> bool:
        return self.state.stage == self._states.RunningStage[stage]

    @property
    def training(self) -> bool:
        """Whether training batches are computed."""
        return self._is("TRAINING")

    @property
    def validating(self) -> bool:
        """Whether validation batches are computed."""
        return self._is("VALIDATING")

    @property
    def testing(self) -> bool:
        """Whether test batches are computed."""
        return self._is("TESTING")

    @property
    def predicting(self) -> bool:
        """Whether batches are predicted."""
        return self._is("PREDICTING")

    @property
    def sanity_checking(self) -> bool:
        """Whether the first validation batches are tried before training."""
        return self._is("SANITY_CHECKING")

    @property
    def evaluating(self) -> bool:
        """Whether batches are validated or tested, or the first ones tried."""
        return self.validating or self.testing or self.sanity_checking

    # --- optimizers

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers; see `StrategyView.optimizers`."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, given: Sequence[Any]) -> None:
        self.strategy.optimizers = given

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers, and when they step."""
        return self.strategy.lr_scheduler_configs

    # --- values

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The latest values of ``self.log``, by name."""
        self._refresh()
        return self._callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The latest values for loggers."""
        self._refresh()
        return self._logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The latest values with ``prog_bar=True``."""
        self._refresh()
        return self._progress_bar_metrics

    def _refresh(self) -> None:
        if self._results is not None:
            self.note(self._results.of_step())

    def note(self, values: dict[str, dict[str, Any]]) -> None:
        """Store values, of a step or of an epoch, for callbacks."""
        self._callback_metrics.update({name: _tensor(value) for name, value in values["callback"].items()})
        self._progress_bar_metrics.update({name: _number(value) for name, value in values["bar"].items()})
        self._logged_metrics.update({name: _tensor(value) for name, value in values["log"].items()})

    def forget_values(self) -> None:
        """Begin with no values, as each call of the Trainer does."""
        self._callback_metrics, self._logged_metrics, self._progress_bar_metrics = {}, {}, {}

    def write(self, values: dict[str, Any], step: int | None = None, behind: int = 0) -> None:
        """Pass values to Lightning's loggers: at a step, or with the epoch at the current one, less ``behind``."""
        numbers = {name: _number(value) for name, value in values.items()}
        if not numbers or not self.is_global_zero:
            return
        if step is None and (own := numbers.pop("step", None)) is not None:  # self.log("step", …) sets it
            step = int(own)
        elif step is None:
            numbers.setdefault("epoch", self.current_epoch)
            step = self.batches_that_stepped - behind
        for logger in self.loggers:
            logger.log_metrics(metrics=numbers, step=step)
            logger.save()

    # --- what the run is

    @property
    def logger(self) -> Any:
        """The first logger, or None; one that is set takes the place of all."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger, or the root folder."""
        folder = (
            getattr(self.logger, "log_dir", None) or getattr(self.logger, "save_dir", None) or self.default_root_dir
        )
        return self.strategy.broadcast(str(folder))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return 0 if self.world_size == 1 else self.global_rank // max(self.num_devices, 1)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return max(1, self.world_size // max(self.num_devices, 1))

    @property
    def num_devices(self) -> int:
        """Number of processes on this machine."""
        import os

        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def device_ids(self) -> list[int]:
        """The devices of this machine's processes."""
        return list(range(self.num_devices))

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.strategy.is_global_zero

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The arguments of a DistributedSampler, or None with one process."""
        return None if self.world_size == 1 else {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def precision(self) -> str:
        """The precision by Lightning's name; by hocket's, if Lightning has none."""
        if self.run_state is None:
            return "32-true"
        name = type(self.run_state.precision).__name__.lower()
        return {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true"}.get(name, name)

    @property
    def accelerator(self) -> Any:
        """The kind of device, such as ``"cpu"``."""
        return self.strategy.root_device.type

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """The batches of each validation loader that are tried before training."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates."""
        return bool(self.num_val_batches) and self.limit_val_batches != 0

    @property
    def max_epochs(self) -> int | None:
        """The epochs of the run, -1 for no limit, or None."""
        return self._length("EPOCH", None)

    @property
    def max_steps(self) -> int:
        """The batches of the run, -1 for no limit."""
        return self._length("BATCH", -1)

    def _length(self, unit: str, otherwise: Any) -> Any:
        duration = None if self.run_state is None else self.run_state.max_duration
        return int(duration.value) if duration is not None and duration.unit.name == unit else otherwise

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of the whole run, or infinity if its length is unknown."""
        epochs, steps = self.max_epochs, self.max_steps
        if epochs is None or epochs == -1 or self.num_training_batches == math.inf:
            return math.inf if steps == -1 else steps
        total = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(epochs, 1)
        return total if steps == -1 else min(total, steps)

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested; set it to True to request one."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._should_stop = bool(stop)

    @property
    def stops(self) -> bool:
        """Whether a stop was requested, and ``min_epochs`` and ``min_steps`` are over; steps alone also need one epoch."""
        least = self.min_epochs or int(self.min_epochs is None and self.min_steps is not None)
        done = self.current_epoch + self.epoch_processed
        return self._should_stop and done >= least and self.global_step >= (self.min_steps or 0)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last one of the epoch; if the length is unknown, the next one is read to know."""
        if self.num_training_batches != math.inf or self.run_state is None or self.batch_idx < 0:
            return self.is_known_last_batch
        return not self.batches_loaded and self.run_state.is_last_batch()

    @property
    def is_known_last_batch(self) -> bool:
        """As `is_last_batch`, and False if the length is unknown."""
        return self.batch_idx + 1 == self.num_training_batches

    @property
    def current_loss(self) -> torch.Tensor | None:
        """The latest loss of training."""
        return None if self.run_state is None else self.run_state.loss

    @property
    def fit_loop(self) -> Any:
        """The counters of training that Lightning's callbacks read."""
        epoch_loop = Loop(
            change=self.change,
            automatic_optimization=SimpleNamespace(_skip_backward=self.skips_backward),
            max_steps=self.max_steps,
            min_steps=self.min_steps,
            _batches_that_stepped=self.batches_that_stepped,
            batch_idx=self.batch_idx,
            total_batch_idx=self.total_batch_idx,
            global_step=self.global_step,
            batch_progress=BatchProgress(self),
            val_loop=SimpleNamespace(_has_run=self.current_epoch >= 0 and self.validated),
        )
        return Loop(
            change=self.change,
            epoch_loop=epoch_loop,
            max_epochs=self.max_epochs,
            total_batch_idx=self.total_batch_idx,
            min_epochs=self.min_epochs,
            max_batches=self.max_batches or self.num_training_batches,
            _skip_backward=self.skips_backward,
        )

    #: Whether batches of training are computed without gradients and steps, as for the statistics of averaged weights.
    skips_backward = False

    @property
    def skips_step(self) -> bool:
        """Whether the current batch of training is followed by no step: Lightning steps after the last one of an epoch."""
        return self.skips_backward and not self.is_known_last_batch

    #: Whether hooks of this fit have changed the number of epochs.
    epochs_changed = False
    #: The batches of an epoch that a callback has set to have no step in it; None for those of the data.
    max_batches: int | float | None = None

    #: Whether a validation has run in this fit; and whether what it draws at random changes what training draws afterwards,
    #: as in Lightning.
    validated = evaluation_draws = False

    def reload_training(self) -> None:
        """Ask for the training loaders again, if they are due; the drop-in Trainer does."""

    def prepare_validation(self) -> None:
        """Ask for the validation loaders again, if they are due, and set the epoch of their samplers."""

    # --- callbacks

    def monitors(self, callback: Any) -> bool:
        """Whether a callback acts on logged values, so that it comes after the module at the end of an epoch."""
        known = self.framework.callbacks
        return isinstance(callback, known.EarlyStopping | known.Checkpoint)

    def _of_kind(self, name: str) -> list[Any]:
        return [each for each in self.callbacks if isinstance(each, getattr(self.framework.callbacks, name))]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that are an EarlyStopping."""
        return self._of_kind("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that write checkpoints."""
        return self._of_kind("Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a ``.ckpt`` file in Lightning's format, from which ``load_from_checkpoint`` and ``ckpt_path=`` read."""
        from hocket_migration.lightning.checkpoint import save

        if storage_options is not None:
            raise WrongType("save_checkpoint(storage_options=…) is not used by hocket. Omit it.")
        save(self, filepath, bool(weights_only))

    def print(self, *arguments: Any, **keywords: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.{name} is not available under hocket. What there is: "
            f"{', '.join(each for each in dir(type(self)) if each[0] != '_')}; and trainer.hocket, the hocket.Trainer, whose "
            "state is trainer.hocket.state."
        )


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise WrongValue(f"A logged value is a tensor of {value.numel()} elements; log one number for a name.")
        return value.item()
    return value
