"""The ``step`` argument of `hocket.Task.train_batch`, as tasks use it."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.basics.types import Batch


class TakesSteps(Protocol):
    """Call it to take a step; see `hocket.loop.task_steps.TaskSteps`."""

    def __call__(self, loss_function: Callable[..., Any], batch: Batch, *optimizers: str, carry: Any = ...) -> Any:
        """Compute the gradients of ``loss_function(batch)`` and step the named optimizers, or all."""

    def manual(self, *optimizers: str) -> AbstractContextManager[Any]:
        """Take steps of the named optimizers, or all, by hand."""

    def any(self, flag: bool | Tensor) -> bool:
        """Whether ``flag`` is true on any rank."""

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over ranks."""

    @property
    def batch(self) -> int:
        """The number of the current batch, from 0."""

    @property
    def batch_in_epoch(self) -> int:
        """The number of the current batch in its epoch, from 0."""
