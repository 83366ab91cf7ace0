"""A LightningModule as a `hocket.Task`: its loss, its optimizers and its state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

import hocket
from hocket.data import batches
from hocket.data.batches import Counts
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket_migration.lightning import algorithms
from hocket_migration.lightning.actions import Actions, NoLoss
from hocket_migration.lightning.arguments import BATCHES, NOT_CALLED
from hocket_migration.lightning.installed_lightning import framework_of, overrides
from hocket_migration.lightning.logged_values import Results, load_metric_states, metric_states
from hocket_migration.lightning.optimizers import NoOptimizer, is_torch_scheduler, parse
from hocket_migration.lightning.trainer_view import TrainerView
from hocket_migration.lightning.training import TrainedModule

if TYPE_CHECKING:
    from hocket.state.state import State

#: Keys of a Lightning checkpoint that hocket's checkpoints have elsewhere.
_STANDARD = ("epoch", "global_step", "pytorch-lightning_version", "state_dict")


class TaskTrainer(TrainerView):
    """The ``trainer`` of a module that was given to a `hocket.Trainer`, which has the data and the duration only later."""

    def __init__(self, module: Any, total_steps: int | None) -> None:
        super().__init__(module)
        self._total_steps = total_steps

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of the whole run. Raises ValueError before it begins, unless they were given."""
        if self._total_steps is not None:
            return self._total_steps
        if not self.begun:
            raise WrongValue(
                f"{type(self.lightning_module).__name__} asks for trainer.estimated_stepping_batches, which a hocket.Trainer "
                "knows after it has data and a duration. Write LightningTask(module, total_steps=…), or use "
                "hocket_migration.lightning.Trainer."
            )
        return super().estimated_stepping_batches


class LightningTask(TrainedModule):
    """An unmodified LightningModule, trained by a `hocket.Trainer`.

    The module's ``training_step``, ``validation_step``, ``predict_step``, ``configure_optimizers`` and hooks are called as
    Lightning calls them, and what ``self.log`` gets is logged by hocket under the same names.
    `hocket_migration.lightning.Trainer` makes such a task by itself.

    Args:
        module: of ``lightning.pytorch`` or ``pytorch_lightning``. ``setup("fit")`` and ``configure_model()`` are called here.
        trainer: what the module gets as ``self.trainer``; None for one that belongs to this task.
        total_steps: the optimizer steps of the run, for modules whose ``setup`` or ``configure_optimizers`` reads
            ``self.trainer.estimated_stepping_batches``.

    Raises:
        TypeError: it is not a LightningModule, or its ``training_step`` takes ``dataloader_iter``.
        ModuleNotFoundError: Lightning is not installed.

    Example:
        >>> import hocket, torch
        >>> from hocket_migration.lightning import LightningTask
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> trainer = hocket.Trainer(
        ...     model=LightningTask(module), train_data=module.train_dataloader(), duration="1ep", device="cpu"
        ... )
        >>> trainer.fit().timestamp.batch
        64
    """

    loss_reduction = "mean"
    logs_for_others = True

    def __init__(self, module: Any, *, trainer: TrainerView | None = None, total_steps: int | None = None) -> None:
        framework = framework_of(module)
        super().__init__()
        self._base = framework.LightningModule
        own = trainer is None
        self.trainer = trainer = TaskTrainer(module, total_steps) if trainer is None else trainer
        if own:
            trainer.enter("FITTING", "TRAINING")
            trainer.hooks.module("setup", stage="fit")
            if overrides(module, "configure_model", self._base):
                trainer.hooks.module("configure_model")
        self.model = module
        _check_methods(module, self._base)
        self._actions = Actions(self)
        self._takes_index = {name: takes_index(getattr(module, name)) for name in _STEPS}
        #: Whether the module's optimizers are made.
        self.optimizes = True

    @property
    def shares_parameters(self) -> bool:
        """Whether optimizers may hold the same parameters, as with manual optimization, which steps each by hand."""
        return not self.model.automatic_optimization

    # --- what hocket calls for a batch

    def forward(self, batch: Any) -> Any:
        """Call ``training_step``, and return what it returned. Outside of a fit, call the module."""
        if not (self._trains and self.trainer.training):
            return self.model(batch)
        return self.training_step(batch)

    def training_step(self, batch: Any) -> Any:
        """Call the module's ``training_step`` for the current batch."""
        run = self.trainer.run_state
        self._results.padding = self._repeats or (run is not None and not run.rank_samples)
        arguments = (batch, self.trainer.batch_idx) if self._takes_index["training_step"] else (batch,)
        self._output = self.trainer.hooks.module("training_step", *arguments)
        return self._output

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Log nothing inside, where an optimizer asks for the gradients of a batch again."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    def loss_of_output(self) -> Tensor | None:
        """Return the loss in what ``training_step`` returned, or None."""
        output = self._output
        if isinstance(output, Mapping):
            output = output.get("loss")
        return output if isinstance(output, Tensor) else None

    def loss(self, outputs: Any, batch: Any) -> Tensor | hocket.Loss:
        """Return the loss that ``training_step`` returned; the batches of a window weigh alike, as in Lightning.

        Raises TypeError for anything else than a tensor, a dict or None.
        """
        if outputs is None:
            if not self._window or self.trainer.world_size > 1:
                raise NoLoss
            trained = next(each for each in self.parameters() if each.requires_grad)
            loss: Tensor | None = trained.reshape(-1)[:1].sum() * 0  # counts as a batch of the window, as in Lightning
        else:
            self._has_loss = True
            loss = self.loss_of_output()
        if loss is None:
            raise WrongType(
                f"training_step of {type(self.model).__name__} returned {type(outputs).__name__}. In automatic optimization it "
                "returns the loss, a dict with the loss at 'loss', or None to skip the batch."
            )
        return hocket.Loss(loss, weight=self._weight) if self._alike else loss

    @property
    def _weight(self) -> float:
        """The weight of a batch of a window: as if it had its share of the samples."""
        run = self.trainer.run_state
        assert run is not None
        if run.strategy.world_size == 1:
            return run.batch_samples / self._loaded
        return run.batch_samples / (self.trainer.accumulate_grad_batches * run.strategy.data_ranks)

    def count(self, batch: Any) -> int | Counts:
        """Return the number of samples, and 1 where it is not certain, such as with leaves of different lengths.

        Batches of unknown size weigh alike in the means over microbatches and ranks.
        """
        try:
            return batches.count(batch)
        except (ValueError, TypeError):
            return 1

    @property
    def shards(self) -> bool:
        """Whether the strategy shards the weights."""
        return self._shards

    def configure_optimizers(self) -> Any:
        """Return the module's optimizers; its schedulers are stepped as Lightning steps them."""
        trainer, module = self.trainer, self.model
        if not self.optimizes:
            return None
        returned = trainer.hooks.module("configure_optimizers")
        kind = type(module).__name__
        optimizers, trainer.strategy.lr_scheduler_configs = parse(returned, bool(module.automatic_optimization), kind)
        if module.automatic_optimization and not overrides(module, "lr_scheduler_step", self._base):
            for config in trainer.lr_scheduler_configs:
                if not is_torch_scheduler(config.scheduler):
                    raise WrongType(
                        f"The scheduler {type(config.scheduler).__name__} of {kind} is not one of torch.optim.lr_scheduler. "
                        "Define lr_scheduler_step(self, scheduler, metric), which steps it."
                    )
        if not optimizers:
            warn(f"configure_optimizers() of {kind} returned None, so its weights do not change.")
            optimizers = [NoOptimizer(module.parameters(), lr=0.0)]
        trainer.optimizers = optimizers
        return list(optimizers)

    # --- the run

    def init(self, state: State) -> None:
        """Connect the module's trainer with the run."""
        self.trainer.run_state = state
        self.trainer._accelerator_connector.is_distributed = state.strategy.world_size > 1
        self._shards = hocket.Need.FULL_PARAMETERS not in state.strategy.offers
        algorithms.refuse(state.bus, type(self.model).__name__)
        self._actions.attach(state)

    def before_load(self, state: State) -> None:
        """Note optimizers that the Trainer was given in place of the module's."""
        trainer = self.trainer
        if list(map(id, state.optimizers)) != list(map(id, trainer.optimizers)):
            trainer.optimizers, trainer.strategy.lr_scheduler_configs = list(state.optimizers), []
        world = state.strategy.world_size
        self._results = self._new_results(world, training=True)

    def _new_results(self, world: int, *, training: bool = False) -> Results:
        assert self.trainer.run_state is not None
        results = Results(self.trainer.run_state.bus.all_reduce if world > 1 else None, training)
        results.samples = self._samples
        results.metric_of = self._metric
        return results

    def _samples(self) -> int:
        """Return the weight of a logged value: the batch size that Lightning infers. Raises an error if it infers none."""
        return 1 if self._batch is None else self.trainer.batch_size_of(self._batch)

    def _metric(self, name: str) -> Any:
        found = self.model
        for part in name.split("."):
            found = getattr(found, part)
        return found

    # --- checkpoints of hocket

    def extra_state(self) -> dict[str, Any]:
        """Return counters, and the state of schedulers, callbacks, and what ``on_save_checkpoint`` adds."""
        trainer = self.trainer
        weights = self._weights_for_callbacks()
        added: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": weights,
        }
        callbacks = {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())}
        trainer.hooks.callbacks("on_save_checkpoint", added)
        trainer.hooks.module("on_save_checkpoint", added)
        replaced = added["state_dict"] is not weights
        return {
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "in_epoch": self._in_epoch,
            "epoch_stepped": self._epoch_stepped,
            "plateau_waits": self._plateau_waits,
            "metrics": trainer.callback_metrics,
            "world_size": trainer.world_size,
            "logged": self._results.state_dict(),
            "metric_states": metric_states(self.model),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": callbacks,
            "added": {
                name: value
                for name, value in added.items()
                if value is not weights and (name not in _STANDARD or (name == "state_dict" and replaced))
            },
            "weights_at": [name for name, value in added.items() if value is weights],
            "gradients": self._waiting_gradients(),
        }

    def _weights_for_callbacks(self) -> dict[str, Any]:
        """Return the weights for callbacks that move them to other names of a checkpoint, as those of averages do."""
        base = self.trainer.framework.Callback
        wanted = any(overrides(each, "on_save_checkpoint", base) for each in self.trainer.callbacks)
        return dict(self.model.state_dict()) if wanted and not self._shards else {}

    def _waiting_gradients(self) -> list[Any] | None:
        """Return the gradients between two batches of manual optimization, which may add to them."""
        if self.model.automatic_optimization or self.trainer.run_state is None:
            return None
        found = [each.grad for each in self.parameters()]
        return found if any(each is not None for each in found) else None

    def load_extra_state(self, state: Any) -> None:
        """Restore what `extra_state` returned."""
        trainer = self.trainer
        for name, value in state["counters"].items():
            setattr(trainer, name, value)
        self._in_epoch, self._plateau_waits = state["in_epoch"], state.get("plateau_waits", False)
        self._epoch_stepped = state.get("epoch_stepped", False)
        trainer._callback_metrics.update(state.get("metrics", {}))
        if state.get("world_size") == trainer.world_size:  # other ranks have other parts of an epoch's means
            self._results.load_state_dict(state["logged"], trainer.strategy.root_device)
            load_metric_states(self.model, state["metric_states"])
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        weights = self._weights_for_callbacks()
        added = dict.fromkeys(state.get("weights_at", ()), weights) | state["added"]
        trainer.hooks.module("on_load_checkpoint", {**state["added"]})
        trainer.hooks.callbacks("on_load_checkpoint", added)
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
                if hasattr(
                    callback, "_internal_optimizer_metadata"
                ):  # of BaseFinetuning: its groups as they were added
                    callback._restarting = False  # the optimizer has them again, with the rates that they have come to
        if state["gradients"] is not None:
            for parameter, gradient in zip(self.parameters(), state["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)


def takes_index(step: Any) -> bool:
    """Whether a step takes the number of the batch, by Lightning's rule: by name, by ``*args`` or as the second argument."""
    if step is None:
        return False
    parameters = inspect.signature(step).parameters.values()
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    varargs = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return varargs or len(positional) >= 2 or "batch_idx" in positional


def _check_methods(module: Any, base: type) -> None:
    """Raise TypeError for methods that are not called, and for steps that fetch batches themselves."""
    kind = type(module).__name__
    for name, write in NOT_CALLED.items():
        if overrides(module, name, base):
            raise WrongType(f"{kind} defines {name}, which is not called. Define {write}.")
    for name in _STEPS:
        if getattr(module, name) is None:
            continue
        if "optimizer_idx" in inspect.signature(getattr(module, name)).parameters:
            raise WrongType(
                f"{name}(optimizer_idx) of {kind} is of an earlier Lightning. Set self.automatic_optimization = False "
                f"and step the optimizers of self.optimizers() in {name}(self, batch, batch_idx)."
            )
        if BATCHES in inspect.signature(getattr(module, name)).parameters:
            raise WrongType(
                f"{name}({BATCHES}) of {kind} fetches batches by itself, which hocket's loop does. Write {name}(self, batch, "
                "batch_idx)."
            )


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_COUNTERS = ("current_epoch", "global_step", "batches_that_stepped", "batch_idx", "total_batch_idx")
