"""The guard against non-finite losses and gradients."""

from __future__ import annotations

from hocket.loop.nonfinite import NonFiniteGuard
from hocket.state.state import State
from hocket_checkpoints.components.generic import Stateful


class Guard(Stateful):
    """The guard's counters; it also keeps non-finite weights out of checkpoints."""

    def __init__(self, state: State, guard: NonFiniteGuard) -> None:
        super().__init__("guard", guard, "the guard")
        self._state, self._guard = state, guard

    def worth_saving(self) -> bool:
        """Whether the weights are finite; see `NonFiniteGuard.before_checkpoint`."""
        return self._guard.before_checkpoint(self._state)
