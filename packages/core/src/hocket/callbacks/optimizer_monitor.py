"""Norms of weights, gradients, updates and the optimizer's averages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hocket.callback import Callback
from hocket.distributed.dtensors import total_norm
from hocket.state import State
from hocket.time import batches


class OptimizerMonitor(Callback):
    """Logs 2-norms over all trained parameters: of gradients (before clipping), weights, updates, and the optimizer's averages.

    ``optimizer/gradient_norm``, ``optimizer/weight_norm``, ``optimizer/update_norm`` and, for Adam and its like,
    ``optimizer/exp_avg_norm`` and ``optimizer/exp_avg_sq_norm``. The gradient is the one that the step is taken with, the
    update all that the batch did to the weights, which are looked at afterwards. Values stay on the device; a batch that is
    looked at keeps a copy of the weights while it steps, and passes over them and the gradients five times.

    Args:
        every: look at every so many batches; a multiple of the Trainer's ``log_every``, as of several values the last is
            logged.
        per_parameter: also log the first three of every parameter, such as ``optimizer/gradient_norm/head.weight``.

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
        #: The trained parameters and copies of what they were before the batch.
        self._before: tuple[list[nn.Parameter], list[Tensor]] | None = None

    def before_train_batch(self, state: State) -> None:
        """Keeps the weights; once, for a step that computes gradients several times has moved them by the second time."""
        if self._before is None and (state.timestamp.batch + 1) % self._every == 0:
            parameters = state.trained_parameters()
            self._before = parameters, [parameter.detach().clone() for parameter in parameters]

    def after_train_batch(self, state: State) -> None:
        """Gradients are complete, unscaled and not yet clipped."""
        if self._before is None:
            return
        gradients = [parameter.grad for parameter in state.trained_parameters() if parameter.grad is not None]
        state.log({"optimizer/gradient_norm": _norm(gradients)})
        if self._per_parameter:
            named = state.model.named_parameters()
            state.log({f"optimizer/gradient_norm/{name}": _norm([p.grad]) for name, p in named if p.grad is not None})

    def batch_end(self, state: State) -> None:
        """The step is taken."""
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
        """Forgets the weights of a batch that was interrupted."""
        self._before = None


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return total_norm(tensors).float()
