"""Training of a LightningModule: hocket's events call its hooks in Lightning's order, and step its schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.basics.time import Time, Unit
from hocket.data.batches import Counts, Window
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.loop.evaluate import evaluate
from hocket.state.requests import Decision
from hocket_migration.lightning.evaluation import EvaluatedModule
from hocket_migration.lightning.installed_lightning import framework_of, overrides
from hocket_migration.lightning.logged_values import Results

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_migration.lightning.actions import Actions
    from hocket_migration.lightning.validation_times import Check

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class TrainedModule(EvaluatedModule):
    """The part of a `LightningTask` that trains."""

    _actions: Actions
    #: The form of the module's batches; None for that of the data.
    unpack: Callable[[Any], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._results = Results()
        #: Whether a batch was begun and not ended; whether the rest of the epoch is skipped; whether one is in progress.
        self._begun = self._skipping = self._in_epoch = self._trained_before = False
        #: Whether schedulers that monitor a value have not stepped after the latest batch, which a validation may follow.
        self._plateau_waits = False
        #: Whether schedulers of this epoch have stepped, where its last batch is known in advance.
        self._epoch_stepped = False
        #: Whether the current batch is a window of several, and whether `training_step` returned a loss for one of them.
        self._window = self._has_loss = False
        #: Whether each batch of a window is a microbatch, and how many there are.
        self._alike = False
        self._loaded = 1
        #: Whether it was warned of a step without a loss; and whether a fit trains.
        self._warned = self._trains = False
        self._first_microbatch = True
        self._fit_begun = self._sanity_begun = self._repeats = self._in_eval_mode = False
        #: Whether a fit ends before its first batch, as the drop-in Trainer's limits may say.
        self.omits_training = False
        #: When a fit of the drop-in Trainer validates.
        self.check: Check | None = None
        #: Names that hocket logs itself.
        self._taken: set[str] = set()

    @property
    def skips(self) -> bool:
        """Whether the rest of the epoch, this batch of a resumed run or all training is omitted: no validation follows."""
        return self._skipping or self._trained_before or self.omits_training

    def before_fit(self, state: State) -> None:
        """``on_fit_start``."""
        check_trains(self.model, optimizes=False)
        # Lightning trains a module in eval mode as it is; hocket would put it into train mode, if all of it were in eval mode.
        self._in_eval_mode = not any(each.training for each in self.model.modules())
        self.model.training |= self._in_eval_mode
        trainer = self.trainer
        self._actions.begin(state)
        trainer.current_epoch = state.timestamp.epoch
        if not isinstance(trainer.num_training_batches, int):
            trainer.num_training_batches = float("inf") if state.epoch_length is None else state.epoch_length
        if not trainer.num_val_batches:
            trainer.num_val_batches = [_length(each.data) for each in state.eval_sets.values()]
        trainer.begun = True
        self.begin_fit(state)
        self._fit_begun = False
        trainer.enter("FITTING", "SANITY_CHECKING")

    def begin_fit(self, state: State) -> None:
        """Call ``on_fit_start``, once for each fit; the drop-in Trainer does so before it asks for loaders."""
        if not self._fit_begun:
            self._fit_begun = True
            self.trainer.enter("FITTING", "TRAINING")
            self.trainer._should_stop = False
            self.trainer.hooks.both("on_fit_start")

    def begin_sanity_check(self) -> None:
        """Call ``on_sanity_check_start``, once."""
        if not self._sanity_begun:
            self._sanity_begun = True
            self.trainer.enter("FITTING", "SANITY_CHECKING")
            self.trainer.hooks.callbacks("on_sanity_check_start")

    def fit_start(self, state: State) -> None:
        """``on_train_start``."""
        trainer = self.trainer
        self.model.training &= not self._in_eval_mode
        trainer.enter("FITTING", "TRAINING")
        trainer._results, self._trains = self._results, True
        trainer.epoch_begun, trainer.epoch_processed = self._in_epoch, False
        self.plan_epochs()
        if self.omits_training:
            state.request(Decision.STOP, reason="there is nothing to train")
            return
        trainer.hooks.both("on_train_start")
        self._stop(state)

    def plan_epochs(self) -> None:
        """Let a fit that has begun end after the trainer's number of epochs, which its hooks may have changed."""
        run, epochs = self.trainer.run_state, self.trainer.max_epochs
        if run is None or epochs is None or not (self._trains and self.trainer.epochs_changed):
            return
        if run.progress.fit_until is not None and run.progress.fit_until.unit is Unit.EPOCH:
            run.progress.fit_until = Time(epochs if epochs != -1 else 2**31, Unit.EPOCH)

    def _stop(self, state: State) -> None:
        if self.trainer.stops:
            state.request(Decision.STOP, reason="trainer.should_stop was set")

    def epoch_start(self, state: State) -> None:
        """``on_train_epoch_start``."""
        trainer = self.trainer
        trainer.current_epoch, trainer.batch_idx = state.timestamp.epoch, -1
        self._skipping, self._in_epoch, self._epoch_stepped = False, True, False
        trainer.reload_training()
        trainer.epoch_begun = True
        trainer.hooks.both("on_train_epoch_start")
        self._stop(state)

    def after_dataloader(self, state: State) -> None:
        """The hooks of the transfer to the device."""
        if not self._skipping and not self.trainer.batches_to_skip:
            batch = state.batch if self.unpack is None else self.unpack(state.batch)
            self._batch = state.batch = self._transferred(batch, 0)

    def _transferred(self, batch: Any, loader: int) -> Any:
        trainer, state = self.trainer, self.trainer.run_state
        assert state is not None
        for name in _TRANSFER:
            owner = trainer.datamodule
            if owner is None or not overrides(owner, name, trainer.framework.LightningDataModule):
                owner = self.model
            with trainer.hooks.named(name):
                method = getattr(owner, name)
                batch = method(batch, state.device, loader) if name == _TRANSFER[1] else method(batch, loader)
        return batch

    def batch_start(self, state: State) -> None:
        """``on_train_batch_start``; if it returns -1, the rest of the epoch is skipped."""
        self._step_plateau()
        self._window = isinstance(state.batch, Window)
        self._first_microbatch = True
        self._has_loss = self._counted = False
        trainer = self.trainer
        self._trained_before = trainer.batches_to_skip > 0
        batches = trainer.batches_loaded = len(state.batch.batches) if self._window else 1
        self._loaded = batches
        self._alike = self._window and all(
            _samples(self.count(each)) <= (state.microbatch or 0) for each in state.batch.batches
        )
        if self._trained_before:
            trainer.batches_to_skip -= 1
            trainer.batch_idx += batches
            trainer.total_batch_idx += batches
            state.request(Decision.SKIP_BATCH, reason="trained on before the checkpoint")
            return
        if self._window:
            return
        if not self._skipping:
            self._begin_batch(state.batch)
            if self._skipping:
                self._begun = False
                self._end_of_epoch_schedulers(state)
        if self._skipping:
            state.request(Decision.SKIP_BATCH, reason="on_train_batch_start returned -1")

    def _begin_batch(self, batch: Any) -> None:
        trainer = self.trainer
        trainer.batch_idx += 1
        trainer.total_batch_idx += 1
        trainer.batches_loaded -= 1
        self._results.next_batch()
        self._batch, self._output, self._begun = batch, None, True
        self._results.padding = False
        self._skipping = trainer.hooks.both("on_train_batch_start", batch, trainer.batch_idx) == -1

    def before_forward(self, state: State) -> None:
        """Begin the next batch of a window, after the end of the one before and the validation that is due there."""
        if not self._window or self._repeats:
            return
        if self._begun:
            self._end_batch()
            self._validate_within(state)
        self._begin_batch(state.batch)
        if self._skipping:
            raise WrongValue(
                f"on_train_batch_start of {type(self.model).__name__} returned -1 within a window of accumulate=, whose "
                "batches are trained on together. Return -1 without accumulation only."
            )

    def _validate_within(self, state: State) -> None:
        now, length = state.timestamp.batch_in_epoch, state.epoch_length
        full = state.strategy.world_size == 1 or (length is not None and now + 1 < length)  # on all ranks
        if self.check is None or not self.check.due_within(together=full):
            return
        samples, self._within = state.aggregates.samples, True
        try:
            evaluate(state, state.eval_sets)
        finally:
            state.aggregates.samples, self._within = samples, False
        self.continue_random_numbers()

    def after_loss(self, state: State) -> None:
        """``on_before_zero_grad`` and ``optimizer_zero_grad``, before the first gradients of a step."""
        if self.model.automatic_optimization and self._first_microbatch:
            self._first_microbatch = False
            self.zero_gradients()

    def zero_gradients(self) -> None:
        """Call the hooks of zeroing gradients."""
        trainer = self.trainer
        trainer.hooks.both("on_before_zero_grad", trainer.optimizers[0])
        trainer.hooks.module("optimizer_zero_grad", trainer.current_epoch, trainer.batch_idx, trainer.optimizers[0])

    def before_backward(self, state: State) -> None:
        """``on_before_backward``, if there is a loss."""
        if self._output is not None or not self._window:
            self.trainer.hooks.both("on_before_backward", state.loss)

    def after_backward(self, state: State) -> None:
        """``on_after_backward``, if there is a loss."""
        if self._output is not None or not self._window:
            self.trainer.hooks.both("on_after_backward")

    def after_train_batch(self, state: State) -> None:
        """``on_before_optimizer_step``."""
        self._first_microbatch = True  # of gradients that an optimizer asks for again
        if self._window and not self._has_loss:
            state.bus.zero_grad(state)
        if not self._actions.steps_itself:
            optimizers = self.trainer.optimizers if self.model.automatic_optimization else state.step_optimizers
            self.trainer.hooks.both("on_before_optimizer_step", optimizers[0])

    def batch_end(self, state: State) -> None:
        """Schedulers, then ``on_train_batch_end``."""
        if self._skipping or self._trained_before:
            return
        self._step_schedulers("step", plateau=False)
        if state.timestamp.batch_in_epoch == state.epoch_length:
            self._end_of_epoch_schedulers(state)
        if self._output is None and self.model.automatic_optimization and not self._warned:
            self._warned = True
            warn(
                f"training_step of {type(self.model).__name__} returned None, so nothing is trained on such a batch. Return "
                "the loss, unless this is on purpose."
            )
        self._end_batch()
        self._write_step(state)
        if self.trainer.ends_by_steps and self.trainer.global_step >= self.trainer.max_steps:
            state.request(Decision.STOP, reason=f"max_steps={self.trainer.max_steps}")
        self._stop(state)

    def _end_batch(self) -> None:
        if not self._begun:
            return
        self._begun = False
        output, automatic = self._output, self.model.automatic_optimization
        if isinstance(output, Mapping):
            outputs = {name: _detached(value) for name, value in output.items()}
        elif output is None:
            outputs = {}
        else:
            outputs = {"loss": _detached(output)}
        if automatic and "loss" in outputs and self.trainer.accumulate_grad_batches > 1:
            outputs["loss"] = outputs["loss"] / self.trainer.accumulate_grad_batches
        self.trainer.batch_ending = True
        self.trainer.hooks.both("on_train_batch_end", outputs, self._batch, self.trainer.batch_idx)
        self.trainer.batch_ending = False

    def _write_step(self, state: State) -> None:
        values = self._results.of_step(stale=True)
        self.trainer.note(values)
        self._log(state, values["log"])
        if self.trainer._logger_connector.should_update_logs:
            self.trainer.write(values["log"])

    def _log(self, state: State, values: Mapping[str, Any]) -> None:
        """Log values by hocket, but those whose names it uses for the same itself."""
        for name, value in values.items():
            if name in self._taken or (isinstance(value, Tensor) and value.numel() != 1):
                continue
            try:
                state.log({name: value})
            except ValueError:  # reserved, such as train/loss
                self._taken.add(name)

    def batch_checkpoint(self, state: State) -> None:
        """Schedulers that monitor a value, in steps; the validation at the end of an epoch comes before them."""
        self.continue_random_numbers()
        if self._skipping or self._trained_before:
            return
        self._plateau_waits = True
        if state.epoch_length not in (None, state.timestamp.batch_in_epoch):
            self._step_plateau()
        if not self.trainer.skips_step:
            self.trainer.batches_that_stepped += 1
        self._counted = True
        self._stop(state)

    def _step_plateau(self) -> None:
        if self._plateau_waits:
            self._plateau_waits = False
            self._step_schedulers("step", plateau=True)

    def epoch_end(self, state: State) -> None:
        """Schedulers in the interval of epochs, if the epoch's length was unknown."""
        self._end_of_epoch_schedulers(state)

    def _end_of_epoch_schedulers(self, state: State) -> None:
        if not self._epoch_stepped:
            self._epoch_stepped = True
            self._step_schedulers("epoch", plateau=False)

    def epoch_checkpoint(self, state: State) -> None:
        """``on_train_epoch_end``, which Lightning calls after validation."""
        self.continue_random_numbers()
        self._step_plateau()
        self._close_epoch(state)
        self.trainer.current_epoch = state.timestamp.epoch
        self.trainer.epoch_begun = self.trainer.epoch_processed = False
        self._skipping = False
        self._stop(state)

    def _close_epoch(self, state: State) -> None:
        if not self._in_epoch:
            return
        trainer, hooks = self.trainer, self.trainer.hooks
        self._in_epoch, trainer.epoch_processed = False, True
        self._results.next_batch()
        trainer.note(self._results.of_epoch(final=False))
        hooks.callbacks("on_train_epoch_end", monitoring=False)
        hooks.module("on_train_epoch_end")
        values = self._results.of_epoch()
        trainer.note(values)
        hooks.callbacks("on_train_epoch_end", monitoring=True)
        self._step_schedulers("epoch", plateau=True)
        self._log(state, values["log"])
        trainer.write(values["log"], behind=1)
        self._results.reset()

    def fit_end(self, state: State) -> None:
        """``on_train_end``."""
        if self.omits_training:
            return
        self._step_plateau()
        if self._in_epoch:  # a fit that ends within an epoch
            self._close_epoch(state)
            self._in_epoch = True
            self.trainer.current_epoch += 1
            self.trainer.epoch_begun = self.trainer.epoch_processed = False
        self.trainer.hooks.both("on_train_end")

    def after_fit(self, state: State) -> None:
        """``on_fit_end``."""
        self.trainer._results, self._trains = None, False
        self.trainer.hooks.both("on_fit_end")
        self.trainer.state.stage = None

    def exception(self, state: State) -> None:
        """``on_exception`` of callbacks and of the data module."""
        assert state.exception is not None
        self.trainer.interrupt(state.exception)

    # --- schedulers

    def _step_schedulers(self, interval: str, *, plateau: bool) -> None:
        trainer, module = self.trainer, self.model
        if not module.automatic_optimization or (trainer.skips_step and not plateau):
            return
        done = (trainer.batch_idx if interval == "step" else trainer.current_epoch) + 1
        for config in trainer.lr_scheduler_configs:
            if config.interval != interval or config.reduce_on_plateau != plateau or done % config.frequency:
                continue
            value = None
            if config.reduce_on_plateau:
                value = trainer.callback_metrics.get(config.monitor or "")
                if value is None and config.strict:
                    raise WrongValue(
                        f"The scheduler {type(config.scheduler).__name__} of {type(module).__name__} monitors "
                        f"{config.monitor!r}, which was not logged. Known: {', '.join(trainer.callback_metrics) or 'nothing'}. "
                        "Set 'monitor' to one of them, or 'strict': False to skip the step."
                    )
                if value is None:
                    continue
            trainer.hooks.module("lr_scheduler_step", config.scheduler, value)


def check_trains(module: Any, optimizes: bool = True) -> None:
    """Raise TypeError if a module does not define what a fit needs."""
    base = framework_of(module).LightningModule
    for name in ("training_step", "configure_optimizers")[: 1 + optimizes]:
        if not overrides(module, name, base):
            raise WrongType(f"{type(module).__name__} has no {name}, so it cannot be trained. Define {name}(self, …).")


def _samples(counted: int | Counts) -> int:
    return counted[0] if isinstance(counted, tuple) else counted


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _length(data: Any) -> int | float:
    try:
        return len(data)
    except TypeError:
        return float("inf")
