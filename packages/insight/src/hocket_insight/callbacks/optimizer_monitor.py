"""Logging of norms of weights, gradients, updates and the optimizer's averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from hocket.basics.dtensors import total_norm
from hocket.state.state import State
from hocket_insight.callbacks.measured_step import MeasuredStep


class OptimizerMonitor(MeasuredStep):
    """Log 2-norms over all trained parameters: of gradients (before clipping), weights, updates and the optimizer's averages.

    The names are ``optimizer/gradient_norm``, ``optimizer/weight_norm``, ``optimizer/update_norm`` and, for Adam and similar
    optimizers, ``optimizer/exp_avg_norm`` and ``optimizer/exp_avg_sq_norm``. The gradient is the one used in the step, the
    update is the total change of the weights by the batch, and the weights are those after it. Values stay on the device. A
    monitored batch keeps a copy of the weights during its step, and reads weights and gradients five times.
    `GradientMonitor` logs the norms of each layer. Of several steps in a batch, the gradient norm is that over all parameters,
    each with the gradient of its last step.

    Args:
        every: number of batches between measurements; best a multiple of the Trainer's ``log_every``, because only the last
            value of a logging interval is logged.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.optimizer_monitor import OptimizerMonitor
        >>> from hocket.loggers.memory import MemoryLogger
        >>> logger = MemoryLogger()
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="adamw(lr=0.1)", device="cpu", log_every="2ba",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 4, callbacks=[OptimizerMonitor(every=2)], loggers=[logger],
        ... )
        >>> result = trainer.fit("1ep")
        >>> "optimizer/update_norm" in logger.metrics
        True
    """

    def __init__(self, every: int = 500) -> None:
        super().__init__(every)
        #: The norms of the gradients of each step of the batch, by the step's name.
        self._norms: dict[str, Tensor] = {}

    def _gradients(self, state: State, parameters: Sequence[nn.Parameter], gradients: Tensor) -> None:
        self._norms[state.step.name] = gradients

    def _step(self, state: State, weights: Tensor, updates: Tensor) -> None:
        if self._norms:
            steps, self._norms = list(self._norms.values()), {}
            state.log({"optimizer/gradient_norm": vector_norm(steps[0] if len(steps) == 1 else torch.cat(steps))})
        state.log({"optimizer/weight_norm": vector_norm(weights), "optimizer/update_norm": vector_norm(updates)})
        held = [values for optimizer in state.optimizers for values in optimizer.state.values()]
        for key in ("exp_avg", "exp_avg_sq"):
            if averages := [values[key] for values in held if isinstance(values.get(key), Tensor)]:
                state.log({f"optimizer/{key}_norm": total_norm(averages).float()})
