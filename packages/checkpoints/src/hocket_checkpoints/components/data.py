"""The positions in training and evaluation data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.help import warn
from hocket.loop.fit import FitLoop
from hocket.state.component import Check, Component, PerRank, Saved, Tree
from hocket.state.state import State

if TYPE_CHECKING:
    from hocket_data.data_module_loading import ModuleData


class TrainingData(Component):
    """The position in the training data on this rank.

    With the same world size each rank continues from its own position. With another, every rank continues from that of rank
    0, which counts global batches: between epochs, or where the strategy divides the data.

    A position that is loaded before there is data is kept until :meth:`data_is_set`. The state of a data module is saved
    with the position.
    """

    path, scope = "data", "rank"

    def __init__(self, state: State, loop: FitLoop, module: ModuleData | None) -> None:
        self._state, self._loop, self._module = state, loop, module
        self._kept: PerRank | None = None

    def state_dict(self, gather: bool) -> Tree:
        """Return the iterator's state, or None without data."""
        if not self._loop.has_data:
            return None
        position = self._loop.data.state_dict()
        return position if self._module is None else {**position, "module": self._module.state_dict()}

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        """Raise DataError if the world size changed within an epoch in which each rank read data of its own."""
        if self._loop.has_data:
            self._mine(saved)
        module = checkpoint.decode((saved.own or {}).get("module", {}))
        return Check((saved, module), [] if module.get("extra") is None else self._misfits())

    def _misfits(self) -> list[str]:
        """Return why the state of a data module cannot be loaded; empty if it can."""
        if self._module is None:
            return [
                "The checkpoint has the state of a data module, and this Trainer has none. Give the same one: «data=module»."
            ]
        return self._module.misfits()

    def load_state_dict(self, saved: tuple[PerRank, dict[str, Any]]) -> None:
        """Move the iterator to the position, or keep the position until there is data."""
        self._kept, module = saved
        if self._module is not None and module:
            self._module.load_state_dict(module)
        if self._loop.has_data:
            self.data_is_set()

    def data_is_set(self) -> None:
        """Move the iterator over new training data to a position that was loaded before there was any.

        Raises DataError as :meth:`check`.
        """
        saved, self._kept = self._kept, None
        position = None if saved is None else self._mine(saved)
        if position is not None:
            if changed := self._loop.data.changed(position):
                warn(
                    f"The training data differs from the checkpoint's: {changed}. It continues with it from the end of the "
                    "epoch. To continue as before, give the Trainer the same data, batch size and «global_batch=» as then."
                )
            self._loop.data.load_state_dict(position)
            self._state.progress.epoch_length = self._loop.data.length

    def _mine(self, saved: PerRank) -> Any:
        """Return this rank's position; None for a checkpoint of a run without data."""
        if len(saved.states) == saved.world_size:
            return saved.states[saved.rank]
        return None if saved.states[0] is None else self._loop.data.reshare(saved.states, saved.world_size)


class EvaluationData(Component):
    """The positions between evaluations, for data that continues from the end of the last iteration."""

    path, scope = "eval_data", "rank"

    def __init__(self, state: State) -> None:
        self._state = state
        #: Positions that were loaded, until :meth:`sets_are_made`.
        self._kept: dict[str, Any] = {}

    def state_dict(self, gather: bool) -> Tree:
        """Return the positions by the set's label."""
        return {label: each.source.position() for label, each in self._state.eval_sets.items()}

    def load_state_dict(self, saved: PerRank) -> None:
        """Restore the positions of existing sets; a new rank takes those of rank 0."""
        self._kept = saved.own
        self.sets_are_made()

    def sets_are_made(self) -> None:
        """Restore the positions of a checkpoint that was loaded before there were sets."""
        for label, each in self._state.eval_sets.items():
            if label in self._kept:
                each.source.restore(self._kept[label])
