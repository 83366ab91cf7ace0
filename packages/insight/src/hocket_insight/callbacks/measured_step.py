"""The base class of callbacks that log norms of gradients, and compare the weights before and after a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hocket.basics.dtensors import norms
from hocket.state.state import State
from hocket_insight.callbacks.periodic_measurement import Measuring


class MeasuredStep(Measuring):
    """Call :meth:`_gradients` and :meth:`_step` in measured batches, in which a copy of the weights before the step is kept.

    Those of one Trainer that measure the same parameters share the copy and the norms.

    Args:
        every: number of batches between measurements.
    """

    def __init__(self, every: int) -> None:
        super().__init__(every, ("before_train_batch", "after_train_batch", "batch_end"))
        #: The parameters that are measured in this batch.
        self._measured: list[nn.Parameter] | None = None
        self._shared = _Shared()

    def fit_start(self, state: State) -> None:
        """Share with the others of the Trainer."""
        self._shared = next(
            (a.obj._shared for a in state.bus.attachments if isinstance(a.obj, MeasuredStep)), self._shared
        )

    def _parameters(self, state: State) -> list[nn.Parameter]:
        return [p for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]]

    def _gradients(self, state: State, parameters: Sequence[nn.Parameter], gradients: Tensor) -> None:
        """Log the norms of the gradients of a step: of the measured parameters that it trains and that have one."""
        raise NotImplementedError

    def _step(self, state: State, weights: Tensor, updates: Tensor) -> None:
        """Log the norms of all measured parameters, and of their change by the batch."""
        raise NotImplementedError

    def before_train_batch(self, state: State) -> None:
        """Copy the weights, on the first call for a batch only: a step may compute gradients again at perturbed weights."""
        self._shared.forget("gradients")
        if self._measured is None:
            self._measured = parameters = self._parameters(state)
            self._shared.users += 1
            self._shared.once("before", parameters, lambda: [parameter.detach().clone() for parameter in parameters])

    def after_train_batch(self, state: State) -> None:
        """Measure the gradients, which are complete, unscaled and not yet clipped."""
        if self._measured is None:
            return
        trained = set(map(id, state.trained_parameters()))
        if held := [p for p in self._measured if p.grad is not None and id(p) in trained]:
            compute = lambda: norms([p.grad for p in held])  # type: ignore[misc]  # noqa: E731
            self._gradients(state, held, self._shared.once("gradients", held, compute))

    def batch_end(self, state: State) -> None:
        """Measure the weights and their change by the batch."""
        if self._measured is not None:
            parameters, self._measured = self._measured, None
            if parameters:
                self._step(state, *self._shared.once("step", parameters, lambda: self._compare(parameters)))
            self._shared.leave()

    def _compare(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        before = self._shared.once("before", parameters, list)
        # In place, since memory for the differences would cost more than computing them.
        changes = [old.sub_(new.detach()) for new, old in zip(parameters, before, strict=True)]
        weights, updates = norms([*parameters, *changes]).chunk(2)
        return weights, updates

    def close(self, state: State) -> None:
        """Discard what was measured in an interrupted batch."""
        self._measured = None
        self._shared.clear()


class _Shared:
    """What is measured in a batch, until the last monitor has it."""

    def __init__(self) -> None:
        self.users = 0
        self._values: dict[str, dict[tuple[int, ...], Any]] = {}

    def once(self, what: str, parameters: Sequence[nn.Parameter], compute: Callable[[], Any]) -> Any:
        """Return what was computed for these parameters, or compute it."""
        values, key = self._values.setdefault(what, {}), tuple(map(id, parameters))
        if key not in values:
            values[key] = compute()
        return values[key]

    def forget(self, what: str) -> None:
        self._values.pop(what, None)

    def leave(self) -> None:
        self.users -= 1
        if self.users <= 0:
            self.clear()

    def clear(self) -> None:
        self.users, self._values = 0, {}
