"""No-op model: train a model of one number, to measure what everything but the model costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.basics.plugin_errors import PlanError
from hocket.data.nesting import map_tensors
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.task import SupervisedTask
from hocket.surgery import Replacement

if TYPE_CHECKING:
    from hocket.state.state import State


class NoOp(nn.Module):
    """Return one number for each sample, ``(N,)``, whatever the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5]))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weight for each sample of the first tensor in the arguments."""
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(len(tensor) if tensor.dim() else 1), (args, kwargs))
        return self.weight.repeat(sizes[0] if sizes else 1)  # not a view, which would outlive a gathered shard


class NoOpLoss(nn.Module):
    """Return the mean of ``(outputs - 1) ** 2``, whatever the targets."""

    def forward(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the loss, a scalar."""
        return (outputs - 1).square().mean()


def no_op_model(model: nn.Module) -> tuple[nn.Module, list[Replacement]]:
    """Return a model with one parameter that takes any inputs, in the place of ``model``.

    Source: the NoOpModel of MosaicML Composer.

    Args:
        model: left unchanged; the new one is on its device and in its dtype.

    Returns:
        The new model, and the replacement.

    Example:
        >>> import torch
        >>> from hocket_general.functional import no_op_model
        >>> model, changed = no_op_model(torch.nn.Linear(4, 1))
        >>> model(torch.zeros(2, 4))
        tensor([1.5000, 1.5000], grad_fn=<RepeatBackward0>)
    """
    new = NoOp()
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    if like is not None:
        new.to(like.device, like.dtype)
    return new, [Replacement("", model, new, new)]


class NoOpModel(Algorithm):
    """Replace model and loss by trivial ones, to measure the time of everything else: data, events, loggers, checkpoints.

    Source: the algorithm of that name of MosaicML Composer. The model has one parameter; the loss is ``(weight - 1) ** 2``.
    Metrics are not updated, because they have no outputs to measure. Compare the throughput with that of a run without it: if
    it is little higher, the data or the logging limit the run, and not the model.

    Raises:
        PlanError: later, for a `hocket.Task`, which has a loss of its own.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, algorithms=[hocket_general.NoOpModel()],
        ... )
        >>> result = trainer.fit()
        >>> list(trainer.model_state_dict())
        ['weight']
    """

    events = {Event.INIT}
    phase = Phase.SELECT  # before surgery, which would be in vain

    def touches(self, model: nn.Module) -> Sequence[str]:
        """See `hocket.Algorithm.touches`."""
        return [f"the model: {type(model).__name__} -> NoOp"]

    def apply(self, event: Event, state: State) -> None:
        """Replace model and loss."""
        task = state.task
        if not isinstance(task, SupervisedTask):
            raise PlanError(
                f"no-op-model replaces the Trainer's model and its loss, but {type(task).__name__} is a hocket.Task, with a "
                "loss of its own. Remove no-op-model, or give the Trainer a plain module and «loss=» for this measurement."
            )
        state.model, changed = no_op_model(state.model)
        task.loss_function, task.outputs = NoOpLoss(), None
        state.replacements += changed

    @hookimpl
    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Any) -> bool:
        """Do nothing."""
        return True
