"""What is done. The first implementation that returns something answers; core's default answers last.

Override an action by implementing it, or surround it with ``@hookimpl(wrapper=True)``::

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, closure):
        ...                      # before
        result = yield           # everyone inside, the default last
        return result            # after

This is how SAM takes two steps, how loss scaling skips one and how an engine owns ``backward``, without the loop knowing
any of them. An action nobody overrides or wraps costs one plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hocket.losses import Loss
    from hocket.state import State


class Actions:
    """The actions of a step in the order in which they happen, then those of evaluation and prediction, and resuming."""

    @hookspec(firstresult=True)
    def gradients(self, state: State, /) -> bool:
        """Compute the gradients of the current batch's mean loss into ``.grad``, and store that loss in ``state.loss``.

        The default calls the events from before_train_batch to after_train_batch. It splits the batch into microbatches,
        reduces over ranks, unscales and clips. An override calls the events of microbatches only if it has microbatches.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def split_batch(self, state: State, batch: Any, size: int, /) -> Sequence[Any]:
        """Cut a batch into microbatches of at most ``size`` samples; together they hold every sample once, in order.

        Strategies whose ranks compute in step may add ``hocket.data.batches.Padding`` at the end, which counts nothing.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def move_batch(self, state: State, batch: Any, /) -> Any:
        """The (micro)batch on ``state.device``, floating-point inputs in the dtype that the precision wants."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def forward(self, state: State, batch: Any, /) -> Any:
        """Outputs of the model for one microbatch, in training mode, under the precision's context."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def loss(self, state: State, outputs: Any, batch: Any, /) -> Loss:
        """The mean loss of one microbatch, the weight it counts with, and its named parts."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def backward(self, state: State, loss: torch.Tensor, /) -> bool:
        """Add the gradients of ``loss`` (a scalar, already multiplied by its share of the batch) to ``.grad``."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def clip_gradients(self, state: State, /) -> torch.Tensor | bool:
        """Clip the gradients in place. The total norm before clipping if it is known (a scalar on the device), else True."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def optimizer_step(self, state: State, closure: Callable[[], torch.Tensor], /) -> bool:
        """Step every optimizer from the gradients in ``.grad``. True if a step was taken, False if it was skipped.

        ``closure()`` computes the gradients of the same batch again, at the current weights, with the action `gradients`; it
        returns the mean loss.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def zero_grad(self, state: State, /) -> bool:
        """Forget all gradients."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def schedule_step(self, state: State, /) -> bool:
        """Bring the learning rates to ``state.timestamp``; called after an optimizer step that was taken."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def eval_forward(self, state: State, batch: Any, /) -> Any:
        """Outputs for one microbatch of an evaluation or prediction, without gradients, in eval mode."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Any, /) -> bool:
        """Show one microbatch to a metric (anything with ``update``, ``compute`` and ``reset``)."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def resume(self, state: State, where: str | Path, /) -> bool:
        """Continue from the checkpoint that ``Trainer(resume=where)`` names: a path, a URL, or ``"auto"``.

        Called while the Trainer is made, between before_load and after_load. The default reads the checkpoint and loads it with
        ``state.content``. `hocket.Checkpoints` also makes the run the one that wrote it.

        Raises:
            hocket.checkpoints.CheckpointError: there is no such checkpoint, or it is damaged.
            hocket.checkpoints.ContentError: it does not fit this run.
        """
        raise NotImplementedError
