"""Average losses over microbatches between the steps of a custom loop; see `hocket.Runtime`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hocket.plugins.bus import Bus
from hocket.training.means import Weighting


class Blocks:
    """Track the weights of the losses in the `Runtime.accumulate` blocks of a model, or of several nested models.

    The gradients become those of the weighted mean of the blocks.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        #: Total weight of the blocks so far. The weight of a block is the weight of its first loss.
        self.total = 0.0
        #: Divisors of the losses, by their index in a block: their weights in the first block whose weight is not 0.
        self.divisors: list[float] = []
        self.block, self.index = 0.0, 0
        self.stepped = False

    def divisor(self, everyone: float) -> float:
        """Return the divisor of the next loss in the block.

        Args:
            everyone: the weight of the loss on all ranks together.

        Raises:
            RuntimeError: the weights of the losses in this block have another ratio than those in earlier blocks.
        """
        index, self.index = self.index, self.index + 1
        if index == 0:
            self.block = everyone
            self.total += everyone
        if self.block and index >= len(self.divisors):
            self.divisors.append(everyone * self.divisors[0] / self.block if index else everyone)
        divisor, first = (self.divisors[index], self.divisors[0]) if self.block else (0.0, 1.0)
        if not math.isclose(everyone * first, self.block * divisor, rel_tol=1e-9):
            raise RuntimeError(_PROPORTIONS.format(index + 1, everyone, self.block))
        return divisor

    @property
    def factor(self) -> float:
        """The factor that turns the accumulated gradients into those of the mean."""
        return float(Weighting(self.divisors[0]).correction(self.total)) if self.divisors else 1.0

    def contains(self, parameters: set[int]) -> bool:
        """Whether one of the models contains one of these parameters (ids)."""
        return any(id(parameter) in parameters for model in self.models for parameter in model.parameters())


class Gradients:
    """Track the gradients that accumulate between steps, and turn them into means over microbatches."""

    def __init__(self) -> None:
        #: Weight of the latest batch of `Runtime.setup_data`: on this rank, and on all ranks together.
        self.batch: tuple[float, float] | None = None
        self._open: list[nn.Module] = []
        self._blocks: dict[tuple[int, ...], Blocks] = {}
        #: Whether there are losses outside of blocks.
        self._plain = False
        #: Whether the latest block ended without a loss.
        self._empty_block = False
        #: Ids of the optimizers whose gradients are means already.
        self._finished: set[int] = set()
        #: Whether the latest loss has weight 0 on this rank.
        self._zero_weight = False
        #: The model that a step of `Runtime.stepper` currently computes with, as the strategy prepared it.
        self.stepping: nn.Module | None = None

    @contextmanager
    def block(self, model: nn.Module) -> Iterator[None]:
        """Delimit the losses of a microbatch."""
        if not self._open:
            self._empty_block = True
            for blocks in self._blocks.values():
                blocks.index = 0
        self._open.append(model)
        try:
            yield
        except BaseException:
            self._empty_block = False
            raise
        finally:
            self._open.pop()

    def loss_factor(self, mine: float, everyone: float, ranks: int) -> float:
        """Return the factor to multiply a loss by before backward, given that the strategy averages gradients over ranks.

        Args:
            mine: the weight of the loss on this rank.
            everyone: the weight on all ranks together.
            ranks: the number of ranks with different data.
        """
        if self._finished:
            self._finished.clear()
            self._plain = False
            self._blocks = {key: blocks for key, blocks in self._blocks.items() if not blocks.stepped}
        divisor = everyone
        if self._open:
            self._empty_block = False
            key = tuple(map(id, self._open))
            if key not in self._blocks:
                self._blocks[key] = Blocks(tuple(self._open))
            divisor = self._blocks[key].divisor(everyone)
        elif self._empty_block:
            raise RuntimeError(_OUTSIDE)
        else:
            self._plain = True
        factor = float(Weighting(divisor, ranks).share(mine)) if mine else 0.0
        self._zero_weight = not factor
        return factor

    def gate(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Zero the gradient of the model's outputs if the loss has weight 0: a mean over no samples is NaN, and so is 0 * NaN.

        Registered as a gradient hook of the outputs.
        """
        return torch.zeros_like(gradient) if self._zero_weight and self.stepping is None else None

    def finish(self, bus: Bus, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of ``optimizer`` into unscaled means. Does nothing if they are already.

        Raises RuntimeError if there are no gradients, or if one factor cannot average all of them.
        """
        if not self._blocks and not self._plain:
            raise RuntimeError("There are no gradients: call backward(loss) before clip_gradients and step.")
        if id(optimizer) in self._finished:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        all_blocks = list(self._blocks.values())
        mine = all_blocks
        if len(all_blocks) > 1:
            ids = set(map(id, parameters))
            mine = [blocks for blocks in all_blocks if blocks.contains(ids)] or all_blocks
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
    "Loss {} of an accumulate block is a mean over {:g} and the first one over {:g}. That ratio differs from the earlier "
    "blocks, so one factor cannot average both. Give the losses of a block the same weight, or add them: backward(a + b)."
)
_OUTSIDE = (
    "backward was called after an accumulate block that did not call it. Call it within the block: "
    "with runtime.accumulate(model, last=…): runtime.backward(loss_function(model(inputs)))."
)
_FACTORS = (
    "The gradients of {} mix losses of accumulate blocks, which are averaged, with losses of another number of blocks or "
    "of none. Step before you compute other losses of the same parameters, or put every backward in a block: "
    "with runtime.accumulate(model): runtime.backward(loss)."
)
