"""What plug-ins ask of the loop."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any


class Decision(enum.Flag):
    """What a plug-in may ask of the loop. Requests of all plug-ins and ranks are combined: one is enough.

    Example:
        >>> import hocket
        >>> class StopWhenFit(hocket.Callback):
        ...     def batch_end(self, state):
        ...         if state.loss < 0.01:
        ...             state.request(hocket.Decision.STOP, reason="the loss is small enough")
    """

    NOTHING = 0
    STOP = enum.auto()  # end this fit after the batch (or epoch) under way
    SKIP_BATCH = enum.auto()  # do not train on this batch; heard until batch_start is over
    EVALUATE = enum.auto()  # evaluate after this batch
    CHECKPOINT = enum.auto()  # write a checkpoint after this batch


class Requests:
    """What was requested and not yet acted upon. Plug-ins add to it (`State.request`), the loop takes from it."""

    __slots__ = ("_reasons", "pending")

    def __init__(self) -> None:
        self.pending = Decision.NOTHING
        self._reasons: list[str] = []

    def add(self, decision: Decision, reason: str = "") -> None:
        """One more."""
        self.pending |= decision
        if reason:
            self._reasons.append(reason)

    def take(self, decision: Decision) -> bool:
        """Whether this was requested; forgets the request."""
        if self.pending is Decision.NOTHING or not self.pending & decision:
            return False
        self.pending &= ~decision
        if decision is Decision.STOP:
            self._reasons.clear()
        return True

    @property
    def reason(self) -> str:
        """Why plug-ins asked to stop, or empty."""
        return "; ".join(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        """Decisions and reasons, as plain data."""
        return {"decisions": [each.name for each in Decision if each in self.pending], "reasons": list(self._reasons)}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.pending = Decision.NOTHING
        for name in tree["decisions"]:
            self.pending |= Decision[name]
        self._reasons = list(tree["reasons"])
