"""Weights that an optimizer evaluates with: those of Schedule-Free, whose optimizers have a training and an evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.basics.dtensors import shard_like
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.attachment import Attachment
from hocket.schedules import Constant

if TYPE_CHECKING:
    from hocket.state.state import State

_BORROW = (Event.EVAL_BEFORE_ALL, Event.PREDICT_START)
_RETURN = (Event.EVAL_AFTER_ALL, Event.PREDICT_END, Event.EXCEPTION, Event.CLOSE)


class OptimizerAverages(Algorithm):
    """Evaluate and predict with the weights that optimizers have in their evaluation mode.

    The Trainer attaches it when an optimizer has the methods ``train()`` and ``eval()``, which exchange the weights in the
    model: those of the library ``schedulefree`` (Defazio et al. 2024, arXiv 2405.15682). Such an optimizer stays in training
    mode. For an evaluation or prediction, and for a checkpoint, its averages are computed; afterwards the training weights are
    restored bitwise, which the optimizer's own ``train()`` would only do up to rounding.
    """

    events = {Event.FIT_START, Event.BATCH_START, *_BORROW, *_RETURN}
    phase = Phase.WEIGHTS

    def __init__(self, state: State, optimizers: Sequence[Any]) -> None:
        self._state, self._optimizers = state, optimizers
        #: Averages from a checkpoint, until training continues: they may be of other weights than the optimizers'.
        self._loaded: dict[str, Tensor] | None = None
        self._train()

    @classmethod
    def attachment(cls, state: State, optimizers: Sequence[Any]) -> Attachment:
        """Return it for attaching; warn of a schedule, which has no place beside it."""
        if not all(isinstance(getattr(each, "schedule", None), Constant) for each in state.schedules):
            warn(
                f"{type(optimizers[0]).__name__} averages weights instead of lowering the learning rate, so a schedule "
                "slows it down. Omit «schedule=», or write «schedule='constant(warmup=0.05dur)'» to warm up."
            )
        return Attachment("algorithms", "optimizer-averages", cls(state, optimizers))

    def apply(self, event: Event, state: State) -> None:
        """Put the averages into the model, or restore the training weights."""
        if event in _RETURN:
            state.give_back(self)
        elif event in _BORROW:
            tensors = self._tensors()
            if state.borrower(tensors.values()) is None:  # else averages of an algorithm are evaluated
                state.borrow(
                    self, ((tensors[name], shard_like(x, tensors[name])) for name, x in self._averages().items())
                )
        else:
            self._loaded = None
            if event is Event.FIT_START:
                self._train()
                self._check_norms(state)

    def _train(self) -> None:
        for optimizer in self._optimizers:
            optimizer.train()

    def _tensors(self) -> dict[str, Tensor]:
        held = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        return {name: each for name, each in self._state.task.named_parameters() if id(each) in held}

    @torch.no_grad()
    def _averages(self) -> dict[str, Tensor]:
        """Return copies of the weights to evaluate; empty before the first step, when they are the training weights."""
        if self._loaded is not None:
            return self._loaded
        if not any(each.state for each in self._optimizers):
            return {}
        tensors = self._tensors()
        training = {name: each.detach().clone() for name, each in tensors.items()}
        try:
            for optimizer in self._optimizers:
                optimizer.eval()
            return {name: each.detach().clone() for name, each in tensors.items()}
        finally:
            self._train()
            for name, each in tensors.items():
                each.copy_(training[name])

    def _check_norms(self, state: State) -> None:
        if any(isinstance(each, _BatchNorm) and each.track_running_stats for each in state.model.modules()):
            warn(
                f"{type(self._optimizers[0]).__name__} evaluates averages of the weights, and the running statistics of "
                "BatchNorm are those of the training weights. Use GroupNorm or LayerNorm, or compute the statistics again "
                "before an evaluation that matters."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the names of the parameters, so that a checkpoint can be evaluated."""
        averages = self._averages()
        return {"averages": averages} if averages else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages, full or sharded. They are evaluated until training continues with those of the optimizers."""
        self._loaded = {name: each.detach().clone() for name, each in state_dict.get("averages", {}).items()} or None
