"""Check that ranks which shard a model run the same units in the same order, and end training if they do not.

Each unit is gathered by a collective. If ranks run different units, such as experts chosen by data, torch silently gathers
parts of both into each, adds up gradients of different weights, or waits forever.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from hocket.errors import WrongType
from hocket_strategies.symmetry_guard import SymmetryError

_END = "nothing more"


class InStep:
    """Compare the units that ranks run: one by one in the first forward pass, before each is gathered; then a hash per batch.

    Args:
        name, rank: those of the strategy.
        model: the sharded model, which is itself a unit.
        chosen: the other units.
        gather: gathers one object from every rank, by rank.
    """

    def __init__(
        self, name: str, rank: int, model: nn.Module, chosen: Sequence[nn.Module], gather: Callable[[Any], list[Any]]
    ) -> None:
        self._name, self._rank, self._gather = name, rank, gather
        self._first = True
        self._seen = 0
        self._model = model
        self._parameters: dict[str, nn.Parameter] = {}
        names = {module: path for path, module in model.named_modules()}
        # The hooks are excluded from compilation: collectives of objects cannot be traced.
        for index, unit in enumerate(chosen, 1):
            # Must run before fully_shard's own hook, which gathers.
            runs = torch.compiler.disable(self._hook(index, names[unit]))
            unit.register_forward_pre_hook(runs, prepend=True)
        model.register_forward_hook(torch.compiler.disable(self._end))

    def _hook(self, index: int, path: str) -> Callable[..., None]:
        def runs(module: nn.Module, inputs: Any) -> None:
            if self._first:
                self._compare(path)
            self._seen = (self._seen * 31 + index) & 0xFFFFFFFF

        return runs

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._first:
            self._compare(_END)
            self._first = False

    def _compare(self, path: str) -> None:
        paths = self._gather(path)
        if len(set(paths)) > 1:
            self._refuse("run", "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(paths)))

    def fingerprint(self) -> int:
        """Return a hash of the units since the last batch, in order, and of the parameters that have a gradient."""
        seen, self._seen = self._seen, 0
        if not self._parameters:  # not earlier: parameters on the meta device are replaced
            self._parameters = dict(self._model.named_parameters())
        graded = bytes(parameter.grad is not None for parameter in self._parameters.values())
        return zlib.crc32(graded, seen)

    def diverged(self) -> None:
        """Raise SymmetryError. Collective."""
        mine = {name for name, parameter in self._parameters.items() if parameter.grad is not None}
        graded = self._gather(mine)
        common = set.intersection(*graded)
        different = [sorted(each - common) for each in graded]
        if any(different):
            found = "; ".join(f"rank {rank}: {', '.join(each) or 'no others'}" for rank, each in enumerate(different))
            self._refuse("have gradients of", found)
        self._refuse("run", "the same ones in another order, or not equally often")

    def _refuse(self, what: str, found: str) -> None:
        raise SymmetryError(
            f"«strategy='{self._name}'»: ranks {what} different parts of the model: {found}. Weights are gathered, and "
            "gradients added up, on all ranks at once, so no rank may skip a module that data or rank select (such as an "
            "expert). Run all of them on every rank, those not selected with weight 0, or use "
            "«strategy={'ddp': {'find_unused_parameters': True}}»."
        )


def not_on_shards(error: Exception, name: str, optimizer: optim.Optimizer) -> TypeError | None:
    """Return an explanation of a step's error if the optimizer cannot work on DTensors, otherwise None."""
    text = str(error)
    if not any(word in text for word in ("DTensor", "placement", "harding")):
        return None
    return WrongType(
        f"«strategy='{name}'»: {type(optimizer).__name__} cannot step on sharded parameters (DTensors). Use an optimizer that "
        "works element by element, such as «optimizer='adamw(lr=1e-3)'», or «strategy='ddp'», which does not shard parameters. "
        f"From torch: {text.splitlines()[0][:150]}"
    )
