"""How losses that add up between steps become their mean over microbatches, in a loop of one's own; see `hocket.Runtime`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hocket.plugins.bus import Bus
from hocket.training.means import Weighting


class Blocks:
    """The losses of one model's `Runtime.accumulate` blocks, which become their weighted mean; or those of nested models."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        #: Weight of the blocks so far. A block weighs what its first loss does.
        self.total = 0.0
        #: What losses were divided by, by their place in a block: their weights in the first block that has any.
        self.units: list[float] = []
        self.block, self.place = 0.0, 0
        self.stepped = False

    def divisor(self, everyone: float) -> float:
        """What to divide a loss by, which is a mean over ``everyone``. Raises RuntimeError if it is not in proportion."""
        place, self.place = self.place, self.place + 1
        if place == 0:
            self.block = everyone
            self.total += everyone
        if self.block and place >= len(self.units):
            self.units.append(everyone * self.units[0] / self.block if place else everyone)
        unit, first = (self.units[place], self.units[0]) if self.block else (0.0, 1.0)
        if not math.isclose(everyone * first, self.block * unit, rel_tol=1e-9):
            raise RuntimeError(_PROPORTIONS.format(place + 1, everyone, self.block))
        return unit

    @property
    def factor(self) -> float:
        """What makes the mean of the gradients."""
        return float(Weighting(self.units[0]).correction(self.total)) if self.units else 1.0

    def reach(self, parameters: set[int]) -> bool:
        """Whether one of the models has one of these parameters, by id."""
        return any(id(parameter) in parameters for model in self.models for parameter in model.parameters())


class Gradients:
    """What has been added up since the last step, and how it becomes a mean over microbatches."""

    def __init__(self) -> None:
        #: What the latest batch of `Runtime.setup_data` counts for: here, and on all ranks.
        self.batch: tuple[float, float] | None = None
        self._open: list[nn.Module] = []
        self._blocks: dict[tuple[int, ...], Blocks] = {}
        #: Whether there are losses outside of blocks.
        self._plain = False
        #: Whether the latest block ended without a loss.
        self._without = False
        self._finished: set[int] = set()
        self._shut = False

    @contextmanager
    def block(self, model: nn.Module) -> Iterator[None]:
        """Around the losses of a microbatch."""
        if not self._open:
            self._without = True
            for blocks in self._blocks.values():
                blocks.place = 0
        self._open.append(model)
        try:
            yield
        except BaseException:
            self._without = False
            raise
        finally:
            self._open.pop()

    def share(self, mine: float, everyone: float, ranks: int) -> float:
        """What to multiply a loss by. Gradients are averaged over ranks."""
        if self._finished:
            self._finished.clear()
            self._plain = False
            self._blocks = {key: blocks for key, blocks in self._blocks.items() if not blocks.stepped}
        divisor = everyone
        if self._open:
            self._without = False
            key = tuple(map(id, self._open))
            if key not in self._blocks:
                self._blocks[key] = Blocks(tuple(self._open))
            divisor = self._blocks[key].divisor(everyone)
        elif self._without:
            raise RuntimeError(_OUTSIDE)
        else:
            self._plain = True
        share = float(Weighting(divisor, ranks).share(mine)) if mine else 0.0
        self._shut = not share
        return share

    def gate(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Hook of the model's outputs: the gradient of a mean over nothing, 0 / 0, times 0 is still not a number."""
        return torch.zeros_like(gradient) if self._shut else None

    def finish(self, bus: Bus, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` unscaled means, once. Raises RuntimeError if there are none, or no one mean."""
        if not self._blocks and not self._plain:
            raise RuntimeError("There are no gradients: call backward(loss) before clip_gradients and step.")
        if id(optimizer) in self._finished:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        all_blocks = list(self._blocks.values())
        mine = all_blocks
        if len(all_blocks) > 1:
            ids = set(map(id, parameters))
            mine = [blocks for blocks in all_blocks if blocks.reach(ids)] or all_blocks
        factors = {blocks.factor for blocks in mine} | ({1.0} if self._plain else set())
        if len(factors) > 1:
            raise RuntimeError(_FACTORS.format(type(optimizer).__name__))
        self._finished.add(id(optimizer))
        for blocks in mine:
            blocks.stepped = True
        bus.unscale_gradients(optimizer)
        if (factor := factors.pop()) != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


_PROPORTIONS = (
    "Loss {} of an accumulate block is a mean over {:g} and the first one over {:g}, a ratio that differs from the blocks "
    "before, so no one factor makes means of both. Give the losses of a block the same weight, or add them: backward(a + b)."
)
_OUTSIDE = (
    "backward was called after an accumulate block in which there was none. Call it within the block: "
    "with runtime.accumulate(model, last=…): runtime.backward(loss_function(model(inputs)))."
)
_FACTORS = (
    "The gradients of {} hold losses of accumulate blocks, to be averaged, and others with another number of blocks or none at "
    "all. Step before other losses of the same parameters, or put every backward in a block: "
    "with runtime.accumulate(model): runtime.backward(loss)."
)
