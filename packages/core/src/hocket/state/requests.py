"""Requests of plug-ins to the training loop."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from hocket.errors import WrongType
from hocket.help.attributes import unknown_member


class Decision(enum.Flag):
    """A plug-in's request to the training loop. The loop acts if any plug-in on any rank requests it.

    Example:
        >>> import hocket
        >>> class StopWhenFit(hocket.Callback):
        ...     def batch_end(self, state):
        ...         if state.loss < 0.01:
        ...             state.request(hocket.Decision.STOP, reason="the loss is small enough")
    """

    NOTHING = 0
    STOP = enum.auto()  # end this fit after the current batch (or epoch), or once the Trainer's min_duration is over
    SKIP_BATCH = enum.auto()  # do not train on this batch; accepted until batch_start is over
    EVALUATE = enum.auto()  # evaluate after this batch
    CHECKPOINT = enum.auto()  # write a checkpoint after this batch


class Requests:
    """Pending requests. Plug-ins add to them (`State.request`), the loop takes them."""

    __slots__ = ("_reasons", "pending")

    def __init__(self) -> None:
        self.pending = Decision.NOTHING
        self._reasons: list[str] = []

    def add(self, decision: Decision, reason: str = "") -> None:
        """Add a request. Raises TypeError for what is not a Decision."""
        if not isinstance(decision, Decision):
            raise WrongType(f"state.request was given {decision!r}. {unknown_member(Decision, str(decision))}")
        self.pending |= decision
        if reason:
            self._reasons.append(reason)

    def take(self, decision: Decision) -> bool:
        """Whether this was requested. Clears the request."""
        if self.pending is Decision.NOTHING or not self.pending & decision:
            return False
        self.pending &= ~decision
        if decision is Decision.STOP:
            self._reasons.clear()
        return True

    @property
    def reason(self) -> str:
        """The reasons why plug-ins asked to stop, or empty."""
        return "; ".join(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        """Return decisions and reasons as plain data."""
        return {"decisions": [item.name for item in Decision if item in self.pending], "reasons": list(self._reasons)}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.pending = Decision.NOTHING
        for name in tree["decisions"]:
            self.pending |= Decision[name]
        self._reasons = list(tree["reasons"])
