"""Logging of norms of weights, gradients, updates and the optimizer's averages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hocket.callback import Callback
from hocket.distributed.dtensors import total_norm
from hocket.state import State
from hocket.time import batches


class OptimizerMonitor(Callback):
    """Log 2-norms over all trained parameters: of gradients (before clipping), weights, updates and the optimizer's averages.

    The names are ``optimizer/gradient_norm``, ``optimizer/weight_norm``, ``optimizer/update_norm`` and, for Adam and similar
    optimizers, ``optimizer/exp_avg_norm`` and ``optimizer/exp_avg_sq_norm``. The gradient is the one used in the step, the
    update is the total change of the weights by the batch, and the weights are those after it. Values stay on the device. A
    monitored batch keeps a copy of the weights during its step, and reads weights and gradients five times.

    Args:
        every: number of batches between measurements; best a multiple of the Trainer's ``log_every``, because only the last
            value of a logging interval is logged.
        per_parameter: also log the first three norms for every parameter, such as ``optimizer/gradient_norm/head.weight``.

    Example:
        >>> import hocket, torch
        >>> from hocket.callbacks.optimizer_monitor import OptimizerMonitor
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

    def __init__(self, every: int = 50, per_parameter: bool = False) -> None:
        self._every = batches(every)
        self._per_parameter = per_parameter
        #: The trained parameters, and copies of their values before the batch.
        self._before: tuple[list[nn.Parameter], list[Tensor]] | None = None

    def before_train_batch(self, state: State) -> None:
        """Copy the weights, on the first call for a batch only: a step may compute gradients again at perturbed weights."""
        if self._before is None and (state.timestamp.batch + 1) % self._every == 0:
            parameters = state.trained_parameters()
            self._before = parameters, [parameter.detach().clone() for parameter in parameters]

    def after_train_batch(self, state: State) -> None:
        """Log norms of the gradients, which are complete, unscaled and not yet clipped."""
        if self._before is None:
            return
        gradients = [parameter.grad for parameter in state.trained_parameters() if parameter.grad is not None]
        state.log({"optimizer/gradient_norm": _norm(gradients)})
        if self._per_parameter:
            named = state.model.named_parameters()
            state.log({f"optimizer/gradient_norm/{name}": _norm([p.grad]) for name, p in named if p.grad is not None})

    def batch_end(self, state: State) -> None:
        """Log norms of weights, updates and averages after the step."""
        if self._before is None:
            return
        (parameters, before), self._before = self._before, None
        weights = [parameter.detach() for parameter in parameters]
        updates = [after - old for after, old in zip(weights, before, strict=True)]
        state.log({"optimizer/weight_norm": _norm(weights), "optimizer/update_norm": _norm(updates)})
        held = [values for optimizer in state.optimizers for values in optimizer.state.values()]
        for key in ("exp_avg", "exp_avg_sq"):
            if averages := [values[key] for values in held if isinstance(values.get(key), Tensor)]:
                state.log({f"optimizer/{key}_norm": _norm(averages)})
        if self._per_parameter:
            names = {id(parameter): name for name, parameter in state.model.named_parameters()}
            for parameter, weight, update in zip(parameters, weights, updates, strict=True):
                if name := names.get(id(parameter)):
                    state.log({f"optimizer/weight_norm/{name}": _norm([weight])})
                    state.log({f"optimizer/update_norm/{name}": _norm([update])})

    def close(self, state: State) -> None:
        """Discard the copied weights of an interrupted batch."""
        self._before = None


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return total_norm(tensors).float()
