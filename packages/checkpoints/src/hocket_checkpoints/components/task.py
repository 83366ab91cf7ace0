"""The state of a Task besides parameters and buffers."""

from __future__ import annotations

from typing import Any

from hocket.basics.plain_data import encode
from hocket.state.component import Check, Component, PerRank, Saved, Tree
from hocket.state.state import State
from hocket.state.task import Task


class ExtraState(Component):
    """`hocket.Task.extra_state` of this rank; a new rank takes that of rank 0."""

    path, scope = "task", "rank"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return the task's extra state."""
        return encode(self._state.task.extra_state(), f"extra_state() of {type(self._state.task).__name__}")

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        """Refuse a state that the task cannot load."""
        takes = type(self._state.task).load_extra_state is not Task.load_extra_state
        problems = []
        if not takes and any(each is not None for each in saved.states):
            problems.append(
                f"The checkpoint has an extra state of its task, but {type(self._state.task).__name__} does not define "
                "load_extra_state(state)."
            )
        return Check(checkpoint.decode(saved.own) if takes else None, problems)

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which have none."""
        return Check()

    def load_state_dict(self, saved: Any) -> None:
        """Pass it to the task, if there is any."""
        if saved is not None:
            self._state.task.load_extra_state(saved)
