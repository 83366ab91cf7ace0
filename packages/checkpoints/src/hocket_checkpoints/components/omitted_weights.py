"""The frozen weights that a checkpoint of ``Checkpoints(only="trainable")`` does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.basics.dtensors import mesh_of
from hocket.state.component import Check, Component, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.frozen_weights import checksum
from hocket_checkpoints.weight_differences import listed


class Omitted(Component):
    """Shape and checksum of the omitted weights by name. They stay as the model was constructed, which is checked."""

    path = "omitted"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return none: `hocket.Checkpoints` omits weights from the tree, and sets this."""
        return {}

    def absent(self, checkpoint: Saved) -> Check:
        """Accept checkpoints with all weights."""
        return Check()

    def check(self, saved: Mapping[str, Any], checkpoint: Saved) -> Check:
        """Compare the omitted weights with those of the model."""
        return Check(saved, differences(self._state, saved))

    def load_state_dict(self, saved: Any) -> None:
        """Do nothing: the weights are there."""


def differences(state: State, omitted: Mapping[str, Any]) -> list[str]:
    """Return the differences of the model's weights to omitted ones, ``{name: (shape, checksum)}``, as sentences."""
    here = dict(state.task.named_parameters(remove_duplicate=False))
    wrong = [name for name, (shape, _) in omitted.items() if name not in here or list(here[name].shape) != shape]
    changed = [
        name
        for name, (_, bits) in omitted.items()
        if name not in wrong and bits is not None and mesh_of(here[name]) is None and checksum(here[name]) != bits
    ]
    problems = []
    if wrong:
        problems.append(
            f"The checkpoint holds trainable weights only, and the model has no frozen weights like {listed(wrong)}. Give "
            "the Trainer the model that was trained."
        )
    if changed:
        problems.append(
            "The checkpoint holds trainable weights only, and they were trained with other values of the frozen weights "
            f"{listed(changed)}. Construct the model with the weights that it had then."
        )
    return problems
