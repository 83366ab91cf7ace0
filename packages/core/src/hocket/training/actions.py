"""What each action does unless a plug-in does it: core's own `actions` plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.data import batches
from hocket.optim.clipping import clip_gradients
from hocket.state import State
from hocket.task import Loss, as_loss
from hocket.training.step import compute_gradients


class DefaultActions:
    """Plain PyTorch, one line or two for each action. The hooks: :mod:`hocket.hookspecs.actions`."""

    def gradients(self, state: State) -> bool:
        """In microbatches, if the Trainer was given a size."""
        compute_gradients(state)
        return True

    def split_batch(self, state: State, batch: Any, size: int) -> Sequence[Any]:
        """Split by the task; views along dimension 0 unless it says otherwise."""
        pieces = state.task.split(batch, size)
        if type(pieces) is list:
            return pieces
        if isinstance(pieces, torch.Tensor | Mapping | str) or not isinstance(pieces, Iterable):
            raise TypeError(
                f"split(batch, size) of {type(state.task).__name__} returned {type(pieces).__name__}. It returns a list of "
                "batches of at most size samples each."
            )
        return list(pieces)

    def move_batch(self, state: State, batch: Any) -> Any:
        """To the device, then as the precision wants it."""
        return state.bus.convert_batch(batches.move(batch, state.device))

    def forward(self, state: State, batch: Any) -> Any:
        """The prepared model, under the precision's context."""
        with state.bus.forward_context():
            return state.prepared(batch)

    def loss(self, state: State, outputs: Any, batch: Any) -> Loss:
        """The task's loss, under the precision's context."""
        with state.bus.forward_context():
            return as_loss(state.task.loss(outputs, batch))

    def backward(self, state: State, loss: torch.Tensor) -> bool:
        """Scaled as the precision wants it."""
        try:
            state.bus.scale_loss(loss).backward()
        except RuntimeError:
            if loss.requires_grad:
                raise
            raise ValueError(
                "The loss has no gradient. Return the tensor that was computed from the model's outputs, without .detach(), "
                ".item(), torch.no_grad() or argmax on the way, and check that the model has parameters to train "
                "(requires_grad)."
            ) from None
        return True

    def clip_gradients(self, state: State) -> torch.Tensor | bool:
        """As the Trainer's ``clip_gradients`` says; over all parameters that optimizers hold."""
        if state.clipping is None:
            return True
        kind, threshold = state.clipping
        norm = clip_gradients(state.trained_parameters(), kind, threshold)
        return True if norm is None else norm

    def optimizer_step(self, state: State, closure: Callable[[], torch.Tensor]) -> bool:
        """Every optimizer, by way of the precision."""
        taken = False
        for optimizer in state.optimizers:
            taken |= state.bus.step_optimizer(optimizer, closure)
        return taken

    def zero_grad(self, state: State) -> bool:
        """Sets gradients to None; of parameters that no optimizer holds, too."""
        for parameter in state.parameters:
            parameter.grad = None
        return True

    def schedule_step(self, state: State) -> bool:
        """Every schedule of the Trainer."""
        for schedule in state.schedules:
            schedule.step(state)
        return True

    def eval_forward(self, state: State, batch: Any) -> Any:
        """The task's ``eval_forward``, under the precision's context."""
        with state.bus.forward_context():
            return state.task.eval_forward(batch)

    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Any) -> bool:
        """The task says what of a batch a metric sees."""
        state.task.update_metric(metric, outputs, batch)
        return True
