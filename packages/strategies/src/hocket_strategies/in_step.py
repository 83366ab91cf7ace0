"""Ranks that shard a model run the same units in the same order, or training ends with what differs.

Each unit is gathered by a collective. Where ranks run different units, as experts that are chosen by data, torch gathers parts
of both into each, adds up gradients of different weights, or waits for ever: nothing that it does says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from hocket_strategies.symmetry_guard import SymmetryError

_END = "nothing more"


class InStep:
    """Compares what ranks run: in the first forward pass unit by unit, before it is gathered; then by a number for each batch.

    Args:
        name, rank: of the strategy.
        model: what was sharded; its whole forward pass is one of the units.
        chosen: the other units.
        gather: one object of every rank, by rank.
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
        # Hooks are not compiled: collectives of objects cannot be traced.
        for index, unit in enumerate(chosen, 1):
            # Before fully_shard's own hook, which gathers.
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
        """Of the units since the last batch, in order, and of the parameters that have a gradient now."""
        seen, self._seen = self._seen, 0
        if not self._parameters:  # not earlier: those on the meta device are replaced
            self._parameters = dict(self._model.named_parameters())
        graded = bytes(parameter.grad is not None for parameter in self._parameters.values())
        return zlib.crc32(graded, seen)

    def diverged(self) -> None:
        """Raise SymmetryError. Every rank has to call it."""
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
            f"strategy='{self._name}': ranks {what} different parts of the model: {found}. Weights are gathered, and gradients "
            "added up, on all ranks at once, so modules that data or rank choose (such as experts) cannot be skipped by some. "
            "Run all of them on every rank, those that are not chosen with weight 0, or use "
            "strategy={'ddp': {'find_unused_parameters': True}}."
        )


def not_on_shards(error: Exception, name: str, optimizer: optim.Optimizer) -> TypeError | None:
    """What to do about an error of a step, if it is that the optimizer cannot work on DTensors."""
    text = str(error)
    if not any(word in text for word in ("DTensor", "placement", "harding")):
        return None
    return TypeError(
        f"strategy='{name}': {type(optimizer).__name__} cannot step on sharded parameters (DTensors). Use an optimizer that "
        "works element by element, such as optimizer='adamw(lr=1e-3)', or strategy='ddp', where parameters are whole. "
        f"From torch: {text.splitlines()[0][:150]}"
    )
