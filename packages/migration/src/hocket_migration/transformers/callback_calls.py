"""Call the callbacks of a transformers Trainer at the events of hocket, and act on what they decide."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from hocket.data import Window
from hocket.errors import Unsupported
from hocket.hookspecs import hookimpl
from hocket.hookspecs.callback import Callback
from hocket.state.requests import Decision
from hocket_migration.transformers.overrides import IGNORED_DECISION

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_migration.transformers.trainer import OnHocket, Plan


#: The fields of `TrainerState` that a run changes.
_STATE = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip

#: The arguments that a run of transformers reads in each step, and hocket at its beginning.
_FIXED = ("gradient_accumulation_steps", "max_grad_norm")


class Flow(Callback):
    """Drive a transformers Trainer: its state, its callbacks, and their decisions to log, evaluate, save and stop.

    A step of hocket, with all its batches of accumulation, is one step of transformers.

    Args:
        trainer: the Trainer of transformers.
        plan: the steps and epochs of the run.
    """

    def __init__(self, trainer: OnHocket, plan: Plan) -> None:
        self._trainer, self._plan = trainer, plan
        self._fixed = {name: getattr(trainer.args, name) for name in _FIXED}
        self._epoch = plan.epochs_trained
        self._steps_in_epoch = 0
        self._batches = plan.batches_skipped
        #: Whether an epoch has begun; the batches of the current step, and those still without gradients.
        self._in_epoch = False
        self._in_step = self._to_do = 0
        self._learning_rate: float | None = None
        self._gradient_norm: Any = None
        #: What a checkpoint of hocket held of the losses that are still to be logged.
        self._restored: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer of transformers, for checkpoints of hocket."""
        trainer = self._trainer
        trained = {name: getattr(trainer.state, name) for name in _STATE}
        return {
            "state": json.dumps(trained),
            "epoch": self._epoch,
            "batches": self._batches,
            "losses": trainer.unlogged(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        for name, value in json.loads(state_dict["state"]).items():
            setattr(self._trainer.state, name, value)
        self._epoch, self._batches = state_dict["epoch"], state_dict["batches"]
        self._restored = dict(state_dict["losses"])

    def _call(self, event: str) -> None:
        trainer = self._trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def fit_start(self, state: State) -> None:
        """Begin the run."""
        self._trainer.begin_training(self._restored)
        self._restored = {}
        self._call("on_train_begin")
        if self._trainer.args.eval_on_start:
            self._trainer._evaluate(None, self._plan.ignore_keys, skip_scheduler=True)

    def epoch_start(self, state: State) -> None:
        """Begin an epoch."""
        self._in_epoch = True
        self._call("on_epoch_begin")

    def batch_start(self, state: State) -> None:
        """Begin a step."""
        self._in_epoch = True
        args = self._trainer.args
        if self._fixed != (fixed := {name: getattr(args, name) for name in _FIXED}):
            raise Unsupported(
                f"A callback changed the arguments from {self._fixed} to {fixed}, which hocket reads once. Call train() again "
                "with other arguments and resume_from_checkpoint=True."
            )
        self._in_step = self._to_do = len(state.batch.batches) if type(state.batch) is Window else 1
        self._call("on_step_begin")

    def after_backward(self, state: State) -> None:
        """Complete a batch that is not the last of its step."""
        self._to_do -= 1
        if self._to_do > 0:
            self._call("on_substep_end")
            if self._trainer.control.should_training_stop:
                raise Unsupported(
                    "A callback set control.should_training_stop in on_substep_end, and hocket ends no step early. Set it in "
                    "on_step_end."
                )

    def after_train_batch(self, state: State) -> None:
        """Note the learning rate of the step."""
        self._learning_rate = self._trainer._get_learning_rate()

    @hookimpl(wrapper=True)
    def optimizer_step(self, state: State) -> Generator[None, bool, bool]:
        """Surround the step of the optimizer by callbacks."""
        norm = state.gradient_norm
        if norm is None:
            gradients = [each.grad for each in state.trained_parameters() if each.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        self._gradient_norm = norm
        self._call("on_pre_optimizer_step")
        stepped = yield
        self._call("on_optimizer_step")
        return stepped

    def batch_checkpoint(self, state: State) -> None:
        """Complete a step: count it, then log, evaluate, save or stop if the callbacks ask for it."""
        trainer = self._trainer
        trainer.state.global_step += 1
        self._batches += self._in_step
        trainer.state.epoch = self._epoch + self._batches / self._plan.steps_in_epoch
        trainer.note_loss(state.loss)
        self._call("on_step_end")
        self._act()
        if getattr(trainer.control, IGNORED_DECISION):
            raise Unsupported(
                f"A callback set control.{IGNORED_DECISION}, and hocket does not end an epoch early. Set "
                "control.should_training_stop, or limit the epochs: hocket={'limit_train': 100}."
            )
        if trainer.control.should_training_stop:
            state.request(Decision.STOP, reason="control.should_training_stop")

    def epoch_end(self, state: State) -> None:
        """Complete an epoch."""
        self._end_epoch()
        self._epoch, self._batches = self._epoch + 1, 0
        if self._trainer.control.should_training_stop:
            state.request(Decision.STOP, reason="control.should_training_stop")

    def fit_end(self, state: State) -> None:
        """Complete the epoch in which the run ends."""
        if self._in_epoch:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._in_epoch = False
        self._call("on_epoch_end")
        self._act()

    def _act(self) -> None:
        trainer = self._trainer
        assert trainer.model is not None
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self._gradient_norm,
            trainer.model,
            None,
            self._epoch,
            self._plan.ignore_keys,
            self._plan.start_time,
            learning_rate=self._learning_rate,
        )
