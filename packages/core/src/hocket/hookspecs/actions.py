"""Actions of the training loop. The first implementation that returns a value other than None counts; core's default is last.

Override an action by implementing it, or surround it with ``@hookimpl(wrapper=True)``::

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, closure):
        ...                      # before
        result = yield           # the inner implementations, the default last
        return result            # after

In this way SAM takes two steps, loss scaling skips one, and an engine replaces ``backward``, without special cases in the
loop. An action without overrides or wrappers costs one plain call.
"""

# Specifications have no bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.markers import hooks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hocket.basics.losses import Loss
    from hocket.basics.types import Batch
    from hocket.state.state import State


@hooks(firstresult=True)
class Actions:
    """The actions of a training step in call order, then those of evaluation, prediction and resuming."""

    def gradients(self, state: State, /) -> bool:
        """Compute the gradients of the current batch's mean loss into ``.grad``, and store that loss in ``state.loss``.

        The default calls the events from before_train_batch to after_train_batch. It splits the batch into microbatches,
        reduces over ranks, unscales and clips. An override calls the events of microbatches only if it has microbatches, and
        ends with `hocket.loop.actions.finish_gradients`.
        With ``accumulate=`` the batch is a `hocket.data.Window`, which `split_batch` takes too.
        """

    def split_batch(self, state: State, batch: Batch, size: int, /) -> Sequence[Any]:
        """Split a batch into microbatches of at most ``size`` samples; together they hold every sample once, in order.

        Strategies whose ranks compute in lockstep may append ``hocket.data.batches.Padding``, which counts 0 samples.
        """

    def move_batch(self, state: State, batch: Batch, /) -> Any:
        """Return the (micro)batch on ``state.device``, with floating-point inputs in the dtype of the precision."""

    def forward(self, state: State, batch: Batch, /) -> Any:
        """Return the outputs of the model for one microbatch, in training mode, under the precision's context."""

    def loss(self, state: State, outputs: Any, batch: Batch, /) -> Loss:
        """Return the mean loss of one microbatch, its weight, and its named parts."""

    def backward(self, state: State, loss: torch.Tensor, /) -> bool:
        """Add the gradients of ``loss`` (a scalar, already weighted by its fraction of the batch) to ``.grad``."""

    def clip_gradients(self, state: State, /) -> torch.Tensor | bool:
        """Clip the gradients in place. Return the total norm before clipping (a scalar on the device) if known, else True."""

    def optimizer_step(self, state: State, closure: Callable[[], torch.Tensor], /) -> bool:
        """Step every optimizer with the gradients in ``.grad``. Return True if a step was taken, False if it was skipped.

        ``closure()`` computes the gradients of the same batch again, at the current weights, with the action `gradients`; it
        returns the mean loss.
        """

    def zero_grad(self, state: State, /) -> bool:
        """Clear all gradients."""

    def schedule_step(self, state: State, /) -> bool:
        """Set the learning rates for ``state.timestamp``. Not called after a skipped optimizer step."""

    def eval_forward(self, state: State, batch: Batch, /) -> Any:
        """Return the outputs for one microbatch of an evaluation or prediction, without gradients, in eval mode."""

    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Batch, /) -> bool:
        """Update a metric (any object with ``update``, ``compute`` and ``reset``) with one microbatch."""

    def resume(self, state: State, where: str | Path, /) -> bool:
        """Continue from the checkpoint that ``Trainer(resume=where)`` names: a path, a URL, or ``"auto"``.

        Called in the constructor of the Trainer, between before_load and after_load. The default reads the checkpoint and
        loads it with ``state.content``. `hocket.Checkpoints` also restores the identity of the run that wrote it.

        Raises:
            hocket.errors.CheckpointError: there is no such checkpoint, or it is damaged.
            hocket.checkpoints.ContentError: it does not fit this run.
        """
