"""Take the steps of a task's `train_batch`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from hocket.help import failures
from hocket.training.step import Step
from hocket.training.steps import StepResult, Steps

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.types import Batch


class TaskSteps(Steps):
    """The ``step`` argument of `hocket.Task.train_batch`. One per Trainer. The arguments are those of `Steps`."""

    caller = "train_batch"

    def __init__(
        self,
        state: State,
        take: Callable[[], bool],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        super().__init__(state, take, compiled)
        #: The batch that `train_batch` was given, and whether it counts.
        self._whole: Any = None
        self._counts = False
        #: Whether `train_batch` is running.
        self._open = False
        #: The precision's context around `train_batch`; steps leave it.
        self._context: AbstractContextManager[Any] | None = None
        #: Whether a step was called in the current batch, and in the current epoch.
        self._called = self._called_in_epoch = False

    @property
    def batch(self) -> int:
        """The number of the current batch, from 0, for steps that are not taken in every batch."""
        return self._state.timestamp.batch

    @property
    def batch_in_epoch(self) -> int:
        """The number of the current batch in its epoch, from 0, such as to begin each epoch without a carried state."""
        return self._state.timestamp.batch_in_epoch

    # --- what the loop calls

    def run(self, counts: bool) -> bool:
        """Call the task's `train_batch` with the current batch, and return whether an optimizer has stepped.

        Args:
            counts: False for a padding batch, on which this rank computes with weight 0.
        """
        state, bus = self._state, self._state.bus
        taken = self._taken = state.step.taken = Counter()
        self._counts = counts
        self._whole = whole = bus.move_batch(state, state.step.batch)
        self._open, self._called = True, False
        for parameter in state.parameters:
            parameter.grad = None
        try:
            with self._within():
                train_batch: Callable[..., Any] = state.task.train_batch
                returned = train_batch(whole, self)
            self._agree("return", "", 0.0)
            with bus.accumulate(state.prepared, True):
                # Buffers that train_batch changed after its last step become those of rank 0 everywhere. Whether it did cannot
                # be known: batch norm writes its running statistics, and `.data` anything, without a new `_version`.
                pass
        except (TypeError, AttributeError) as error:
            failures.explain_step(error, whole)
            raise
        finally:
            self._open, self._whole = False, None
        if returned is not None and not isinstance(returned, StepResult):
            raise TypeError(
                f"train_batch of {type(state.task).__name__} returned {type(returned).__name__}, which is not used for "
                "training. Call step(loss_function, batch) instead of returning a loss."
            )
        self._check_weights()
        state.step.batch = whole
        return bool(taken)

    def epoch_end(self) -> None:
        """Warn if no step was called in the epoch."""
        if not self._called_in_epoch:
            warnings.warn(
                f"train_batch of {type(self._state.task).__name__} called step(…) in no batch of this epoch, so no optimizer "
                "has stepped. Call step(self.loss_function, batch) where it should train.",
                stacklevel=2,
            )
        self._called_in_epoch = False

    # --- inside

    def _check_call(self, loss_function: Any, batch: Batch, optimizers: Sequence[Any]) -> None:
        if not self._open:
            raise RuntimeError("step(…) is called in train_batch, while that runs.")
        super()._check_call(loss_function, batch, optimizers)
        if not self._called and any(parameter.grad is not None for parameter in self._state.parameters):
            raise RuntimeError(
                "train_batch computed gradients before its first step(…), which sets gradients to zero, so they would be lost. "
                "Compute that loss in a loss function instead of calling backward()."
            )
        self._called = self._called_in_epoch = True

    def _samples(self, batch: Batch) -> int:
        if not self._counts:
            return 0
        return self._state.step.samples if batch is self._whole else super()._samples(batch)

    def _log(self, step: Step) -> None:
        prefix = f"train/{step.name}" if step.name and len(self._state.optimizers) > 1 else "train"
        assert step.loss is not None
        self._state.log({f"{prefix}/loss": step.loss, **{f"{prefix}/{name}": v for name, v in step.losses.items()}})

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Enter the precision's context; steps leave it meanwhile (`_around`)."""
        self._context = self._state.bus.forward_context()
        self._context.__enter__()
        try:
            yield
        finally:
            self._context.__exit__(None, None, None)

    @contextmanager
    def _around(self) -> Iterator[None]:
        assert self._context is not None
        self._context.__exit__(None, None, None)
        try:
            yield
        finally:
            self._context = self._state.bus.forward_context()
            self._context.__enter__()
