"""The base class of callbacks that compare the weights before and after a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hocket.callback import Callback
from hocket.state import State
from hocket.time import batches


class MeasuredStep(Callback):
    """Call :meth:`_gradients` and :meth:`_step` in measured batches, in which a copy of the weights before the step is kept.

    Args:
        every: number of batches between measurements.
    """

    def __init__(self, every: int) -> None:
        self.every_batches = dict.fromkeys(("before_train_batch", "after_train_batch", "batch_end"), batches(every))
        #: The measured parameters, and copies of their values before the batch.
        self._before: tuple[list[nn.Parameter], list[Tensor]] | None = None

    def _parameters(self, state: State) -> list[nn.Parameter]:
        return [p for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]]

    def _gradients(self, state: State, parameters: Sequence[nn.Parameter]) -> None:
        raise NotImplementedError

    def _step(self, state: State, parameters: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def before_train_batch(self, state: State) -> None:
        """Copy the weights, on the first call for a batch only: a step may compute gradients again at perturbed weights."""
        if self._before is None:
            parameters = self._parameters(state)
            self._before = parameters, [parameter.detach().clone() for parameter in parameters]

    def after_train_batch(self, state: State) -> None:
        """Measure the gradients, which are complete, unscaled and not yet clipped."""
        if self._before is not None:
            self._gradients(state, self._before[0])

    def batch_end(self, state: State) -> None:
        """Measure the weights and their change by the batch."""
        if self._before is not None:
            (parameters, before), self._before = self._before, None
            # In place, since memory for the updates would cost more than computing them.
            updates = [old.neg_().add_(new.detach()) for new, old in zip(parameters, before, strict=True)]
            self._step(state, parameters, updates)

    def close(self, state: State) -> None:
        """Discard the copied weights of an interrupted batch."""
        self._before = None
