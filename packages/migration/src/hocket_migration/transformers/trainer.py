"""transformers' Trainer with the loop of hocket: everything that a user sees of it is that of transformers."""

from __future__ import annotations

import dataclasses
import inspect
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, denumpify_detensorize

import hocket
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket_migration.transformers import arguments, overrides
from hocket_migration.transformers.batches import Batches, OfRank
from hocket_migration.transformers.callback_calls import Flow
from hocket_migration.transformers.predictions import Predictions, prediction_of
from hocket_migration.transformers.task import TrainerTask

#: They set the states of the generators of Python, NumPy and torch.
_GENERATORS: tuple[Callable[[Any], None], ...] = (random.setstate, numpy.random.set_state, torch.set_rng_state)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The steps and epochs of a run, and where a resumed one continues."""

    steps: int
    steps_in_epoch: int
    epochs_trained: int
    batches_skipped: int
    checkpoint: str | None
    ignore_keys: list[str] | None
    start_time: float


class OnHocket(transformers.Trainer):
    """The loop of hocket for a Trainer of transformers; see `Trainer`."""

    def __init__(self, *args: Any, hocket: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        overrides.check(type(self), OnHocket, type(self).__mro__[type(self).__mro__.index(OnHocket) + 1])
        signature = inspect.signature(transformers.Trainer.__init__)
        if "tokenizer" in kwargs and "tokenizer" not in signature.parameters:
            raise WrongType(
                f"{type(self).__name__}(tokenizer=) is a name of transformers 4. Write processing_class=, its name in "
                f"transformers {transformers.__version__}."
            )
        given = signature.bind(self, *args, **kwargs).arguments
        arguments.check_types(type(self).__name__, given)
        if given.get("args") is not None:
            arguments.check(given["args"])
        #: Arguments of hocket.Trainer that win over those that are translated.
        self.hocket_arguments: dict[str, Any] = arguments.checked_hocket(hocket)
        #: The Trainer of hocket, once there is one: after `train`, `evaluate` or `predict` has begun.
        self.hocket: Any = None
        super().__init__(*args, **kwargs)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # hocket launch starts a process for each GPU
        self._train_batch_size = self.args.train_batch_size
        if self.args.world_size > 1:  # hocket sums over ranks
            self.args.average_tokens_across_devices = False
        self._options: tuple[bool, list[str] | None] = (True, None)

    # --- what hocket's loop asks for

    def sums_losses(self, items: Any) -> bool:
        """Whether the losses of the batches of a step are summands of its loss, as transformers decides it."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    @property
    def prediction_options(self) -> tuple[bool, list[str] | None]:
        """Whether the current evaluation needs losses only, and the outputs to ignore."""
        return self._options

    def note_inputs(self, batch: Any) -> None:
        """Count operations and tokens of a batch in training, as the Trainer's state reports them."""
        self.current_flos += float(self.floating_point_ops(batch))  # type: ignore[assignment]  # as transformers
        self._track_num_input_tokens(batch)

    def note_loss(self, loss: torch.Tensor | None) -> None:
        """Add the loss of a step to those that are logged."""
        if loss is None:  # a skipped batch
            return
        if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss

    def begin_training(self, restored: Mapping[str, float]) -> None:
        """Begin to count losses and steps, or continue with those that `unlogged` returned."""
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._tr_loss = torch.tensor(restored.get("pending", 0.0), device=self.args.device)
        self._total_loss_scalar: float = restored.get("total", 0.0)
        self._globalstep_last_logged = int(restored.get("step", self.state.global_step))
        if restored:
            self._initial_global_step = int(restored["began"])

    def unlogged(self) -> dict[str, float]:
        """Return the losses that are not logged yet, and those of the run so far."""
        return {
            "pending": self._tr_loss.item(),
            "total": self._total_loss_scalar,
            "step": self._globalstep_last_logged,
            "began": self._initial_global_step,
        }

    # --- training

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train with hocket, after `train` has made model and settings ready."""
        started = time.time()
        loader: Any = self.get_train_dataloader()
        of_rank: Any = OfRank(loader, self.args.world_size)
        epochs, steps_per_epoch, _, samples, _, steps_in_epoch, steps = self.set_initial_training_values(
            self.args, of_rank
        )
        assert steps_in_epoch is not None and self.model is not None
        trained, skipped = self._init_training_state(steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        plan = Plan(steps, steps_in_epoch, trained, skipped, resume_from_checkpoint, ignore_keys_for_eval, started)
        self._warn_of_sums()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if self.hocket is not None:
            self.hocket.close()
        self.model.train()
        self.begin_training({})
        remaining = max(steps - self.state.global_step, 0)
        self.hocket = trainer = self._trainer(
            callbacks=[*self.hocket_arguments.get("callbacks", ()), Flow(self, plan)],
            train_data=Batches(loader, trained, skipped, partial(self._restore_random_numbers, plan)),
            optimizer=lambda parameters: self._checked_optimizer(self.create_optimizer()),
            schedule=partial(self._schedule, steps=steps),
            duration=f"{max(remaining, 1)}ba",
        )
        state = trainer.state
        self.optimizer, self.model_wrapped = state.optimizers[0], state.prepared
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        if self.args.save_strategy != "no" and _sharded(self.model):
            raise WrongValue(
                f"save_strategy={str(self.args.save_strategy)!r} writes full optimizers, and the strategy "
                f"'{state.strategy.name}' shards them. Write save_strategy='no', and pass hocket={{'checkpoints': "
                "hocket.Checkpoints(folder, every='500ba'), 'resume': 'auto'}."
            )
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        if remaining or skipped:  # transformers takes a step also where a run of max_steps ended within an epoch
            trainer.fit()
        else:
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        return self._finalize_training(trial, samples, started)

    def _trainer(self, **given: Any) -> Any:
        made = {**arguments.for_loop(self.args), **given, **self.hocket_arguments}
        if "callbacks" in given:
            made["callbacks"] = given["callbacks"]
        return hocket.Trainer(model=TrainerTask(self), **made)

    def _schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        self.optimizer = optimizer
        made = self.create_scheduler(num_training_steps=steps, optimizer=optimizer)
        return _Untouched(made) if arguments.waits_for_metrics(made) else made

    def _checked_optimizer(self, optimizer: Any) -> torch.optim.Optimizer:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WrongType(
                f"create_optimizer of {type(self).__name__} returned {type(optimizer).__name__}. Return the "
                "torch.optim.Optimizer, also where it is stored in self.optimizer."
            )
        return optimizer

    def _restore_random_numbers(self, plan: Plan) -> None:
        if plan.checkpoint is not None:
            self._load_rng_state(plan.checkpoint)

    def _warn_of_sums(self) -> None:
        """Say once that a loss ignores ``num_items_in_batch``, so that transformers adds up means."""
        steps = self.args.gradient_accumulation_steps
        if steps == 1 or self.loss_is_scaled_for_ga is not None or not self.sums_losses(1):
            return
        function = self.compute_loss_func or type(self).compute_loss
        own = function is transformers.Trainer.compute_loss
        if own:
            assert self.model is not None
            function = type(self.model).forward
        if overrides.ignores_items(function):
            name = getattr(function, "__qualname__", type(function).__name__)
            warn(
                f"{name} returns the mean over a batch and does not use num_items_in_batch, and transformers adds up the "
                f"means of the {steps} batches of a step: the loss and its gradient are {steps} times as large. This run does "
                f"the same. Set loss_is_scaled_for_ga = False in a subclass of Trainer, or trainer.loss_is_scaled_for_ga = "
                "False, to train on their mean."
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights that evaluation uses, such as the averages of EMA; in checkpoints those that are trained."""
        trainer = self.hocket
        evaluates_others = trainer is not None and any(
            each.kind == "algorithms" for each in trainer.state.bus.listeners("predict_start")
        )
        if trainer is None or not (_sharded(self.model) or (evaluates_others and not _internal_call)):
            super().save_model(output_dir, _internal_call)
            return
        weights = trainer.model_state_dict(evaluated=not _internal_call)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=weights)

    # --- data

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that prepares loaders alone, in the order of transformers; hocket divides them over ranks."""
        super().create_accelerator_and_postprocess()
        settings: Any = self.args.accelerator_config  # TrainingArguments made it of what it was given

        def prepare_loader(loader: Any, *options: Any, **more: Any) -> Any:
            return prepare_data_loader(
                loader,
                num_processes=1,
                process_index=0,
                use_seedable_sampler=settings.use_seedable_sampler,
                data_seed=self.args.data_seed,
            )

        def prepare(*given: Any, **options: Any) -> Any:
            made = tuple(prepare_loader(each) if isinstance(each, DataLoader) else each for each in given)
            return made if len(made) > 1 else made[0]

        vars(self.accelerator).update(prepare=prepare, prepare_data_loader=prepare_loader)

    # --- evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate or predict with hocket; return predictions, labels and metrics as transformers does."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        of_batch = args.batch_eval_metrics and self.compute_metrics is not None
        if of_batch and args.world_size > 1:
            raise WrongValue(
                "TrainingArguments(batch_eval_metrics=True) computes metrics of the batches of one process, and there are "
                f"{args.world_size}. Omit it: eval_accumulation_steps=1 moves predictions to the CPU after each batch."
            )
        keep = [] if loss_only else ["logits", "labels"]
        keep += [name for name in ("inputs", "losses") if name.removesuffix("es") in _included(args)]
        predictions = Predictions(
            keep,
            main_input=getattr(self.model, "main_input_name", "input_ids"),
            preprocess=self.preprocess_logits_for_metrics,
            every=args.eval_accumulation_steps,
            concatenate=args.eval_do_concat_batches,
            of_batch=self.compute_metrics if of_batch else None,
            collect=not args.batch_eval_metrics or description == "Prediction",
        )
        if self.hocket is None:
            self.hocket = self._trainer()
        self.callback_handler.eval_dataloader = dataloader
        label = "eval" if metric_key_prefix == "train" else metric_key_prefix
        outer, self._options = self._options, (loss_only, ignore_keys)
        try:
            values = self.hocket.evaluate(
                {label: hocket.EvalSet(Batches(dataloader), metrics=lambda: {"predictions": predictions})}
            )
        finally:
            self._options = outer
        # As transformers leaves random numbers and the mode of the model.
        for restore, state in zip(_GENERATORS, self.hocket.state.task.random_numbers, strict=True):
            restore(state)
        if self.model is not None:
            self.model.eval()
        arrays, samples = predictions.gathered(self.hocket.state.bus.all_gather_object)
        metrics: Any = predictions.metrics or {}
        complete = arrays.get("logits") is not None and arrays.get("labels") is not None
        if self.compute_metrics is not None and complete and not of_batch:
            metrics = self.compute_metrics(prediction_of(arrays))
        metrics = dict(denumpify_detensorize(metrics))
        if f"{label}/loss" in values:
            metrics[f"{metric_key_prefix}_loss"] = values[f"{label}/loss"]
        prefixed = {
            name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}": value
            for name, value in metrics.items()
        }
        logits: Any = arrays.get("logits")
        return EvalLoopOutput(logits, arrays.get("labels"), prefixed, samples)


class Trainer(OnHocket):
    """transformers' Trainer, with its arguments and methods, whose steps and evaluations hocket runs.

    Data order, random numbers, optimizer, schedule, logs, checkpoints and callbacks are those of transformers; gradients,
    accumulation, clipping, precision and strategies are those of hocket. Losses and weights equal those of transformers.

    Args:
        hocket: arguments of `hocket.Trainer` that are added to the translated ones or replace them, such as
            ``{"algorithms": ["ema"], "strategy": "fsdp"}``. Callbacks are added.
        args, kwargs: the arguments of `transformers.Trainer`.

    Raises:
        TypeError: a subclass overrides a method that hocket does not call.
        ValueError: ``args`` has a field that hocket does not support; the message says which, and what to write.

    Example:
        >>> import torch, transformers
        >>> from hocket_migration.transformers import Trainer
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> rows = [{"input_ids": torch.arange(i, i + 8) % 16, "labels": torch.arange(i, i + 8) % 16} for i in range(32)]
        >>> trainer = Trainer(
        ...     model=transformers.GPT2LMHeadModel(config), train_dataset=rows,
        ...     args=transformers.TrainingArguments(num_train_epochs=1, use_cpu=True, save_strategy="no", disable_tqdm=True),
        ... )
        >>> trainer.train().global_step
        {'train_runtime': ...}
        4
    """


class _Untouched:
    """A scheduler that `_evaluate` steps with a metric, so that hocket does not step it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(tree)


def _sharded(model: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _included(args: Any) -> list[str]:
    return list(args.include_for_metrics or ())
