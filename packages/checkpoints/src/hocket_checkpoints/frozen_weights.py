"""``Checkpoints(only="trainable")``: omit frozen weights that have not changed since the model was constructed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.basics.dtensors import local, mesh_of
from hocket.state.state import State

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits as integers, which is the same on any device; for a DTensor, of the local shard."""
    return int(bits(tensor).sum(dtype=torch.int64).item()) if tensor.numel() else 0


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, or of the local shard of a DTensor, as a vector of integers."""
    mine = local(tensor.detach())
    integers = _INTEGERS.get(mine.element_size(), torch.int8)
    return mine.contiguous().reshape(-1).view(integers)


class FrozenWeights:
    """Remember the weights as constructed, and tell which frozen ones have not changed since."""

    def __init__(self) -> None:
        #: For each parameter as constructed: its checksum.
        self._constructed: dict[str, int] = {}
        self._said = False

    def construct(self, state: State) -> None:
        """Note all parameters, before a checkpoint is loaded: some may be frozen later."""
        named = state.task.named_parameters(remove_duplicate=False)
        self._constructed = {name: checksum(parameter) for name, parameter in named}

    def split(
        self, state: State, weights: Mapping[str, Any], prefix: str, where: object
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the weights to save, and for the omitted ones shape and checksum by name; print one line about it, once.

        A frozen parameter that was trained before is saved. Buffers are saved, because training may change them. Every rank
        has to call this.

        Args:
            prefix: what the task's names of the weights begin with and their names in ``weights`` do not.
            where: the folder of the checkpoints, for the message.
        """
        same = {
            name: parameter
            for name, parameter in state.task.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and self._constructed.get(name) == checksum(parameter)
        }
        everywhere = set.intersection(*map(set, state.bus.all_gather_object(list(same))))
        omitted: dict[str, Any] = {
            name: [list(parameter.shape), None if mesh_of(parameter) is not None else self._constructed[name]]
            for name, parameter in same.items()
            if name in everywhere and name.startswith(prefix) and name.removeprefix(prefix) in weights
        }
        kept = {name: value for name, value in weights.items() if f"{prefix}{name}" not in omitted}
        if state.strategy.rank == 0 and not self._said:
            self._said = True
            parameters = sum(same[name].numel() for name in omitted)
            print(
                f"hocket: checkpoints in {where} omit {len(omitted)} frozen weights of {parameters:,} parameters, and hold the "
                f"other {len(kept)} tensors of the model. To resume, construct the model with the same frozen weights.",
                file=sys.stderr,
                flush=True,
            )
        return kept, omitted
