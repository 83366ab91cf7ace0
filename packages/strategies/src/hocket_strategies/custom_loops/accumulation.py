"""Average losses over microbatches between the steps of a custom loop; see `hocket.Runtime`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hocket.errors import WrongState
from hocket.help import warn
from hocket.loop.weighing import Weighting
from hocket.optim.closures import needs_closure
from hocket.plugins.bus import Bus


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
        #: Whether the latest block was the last microbatch of a step.
        self.last = True
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
            raise WrongState(_PROPORTIONS.format(index + 1, everyone, self.block))
        return divisor

    @property
    def factor(self) -> float:
        """The factor that turns the accumulated gradients into those of the mean."""
        return float(Weighting(self.divisors[0]).correction(self.total)) if self.divisors else 1.0

    def contains(self, parameters: set[int]) -> bool:
        """Whether one of the models contains one of these parameters (ids)."""
        return any(_held(model, parameters) for model in self.models)


class Gradients:
    """Track the gradients that accumulate between steps, and turn them into means over microbatches."""

    def __init__(self) -> None:
        #: Weight of the latest batch of `Runtime.setup_data`: on this rank, and on all ranks together.
        self.batch: tuple[float, float] | None = None
        #: The same for each loader that is being iterated over, by its id.
        self.batches: dict[int, tuple[float, float]] = {}
        self._warned = False
        #: Models of the open blocks, and whether the block is the last one before a step.
        self._open: list[tuple[nn.Module, bool]] = []
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
        #: Whether a prepared model is called now, and not the given module itself.
        self.calling = False
        #: The number of the current backward pass; None outside of `Runtime.backward`.
        self._backward: int | None = None
        self._backwards = 0
        #: The backward pass in which the strategy reduced the gradients of a model since its latest call; None before it.
        self._reduced: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()
        #: Models with gradients that no rank has reduced yet, in this order on all ranks.
        self._unreduced: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()

    def begin_backward(self) -> None:
        """Begin a backward pass of `Runtime.backward`."""
        self._backwards += 1
        self._backward = self._backwards

    def end_backward(self) -> None:
        """End it."""
        self._backward = None

    @contextmanager
    def block(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Delimit the losses of a microbatch."""
        if not self._open:
            self._empty_block = True
            for blocks in self._blocks.values():
                blocks.index = 0
        self._open.append((model, last))
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
            models = tuple(model for model, _ in self._open)
            key = tuple(map(id, models))
            blocks = self._blocks.setdefault(key, Blocks(models))
            blocks.last = all(last for _, last in self._open)
            divisor = blocks.divisor(everyone)
        elif self._empty_block:
            raise WrongState(_OUTSIDE)
        else:
            self._plain = True
        factor = float(Weighting(divisor, ranks).share(mine)) if mine else 0.0
        self._zero_weight = not factor
        return factor

    def latest(self, ranks: int) -> tuple[float, float]:
        """Return the weight of the latest batch, or 1. Warns if it is a guess which loader's batch the loss belongs to."""
        if len(self.batches) > 1 and not self._warned and (ranks > 1 or self._open):
            shares = {(mine / everyone, everyone) for mine, everyone in self.batches.values() if everyone}
            if len(shares) > 1:
                self._warned = True
                warn(_LOADERS)
        return self.batch or (1.0, float(ranks))

    def gate(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Zero the gradient of the model's outputs if the loss has weight 0: a mean over no samples is NaN, and so is 0 * NaN.

        Registered as a gradient hook of the outputs.
        """
        return torch.zeros_like(gradient) if self._zero_weight and self.stepping is None else None

    def hook(self, model: nn.Module, forward: bool) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """Return the gradient hook of the outputs of a call of ``model`` on one of several ranks.

        A strategy that reduces gradients during backward, as DistributedDataParallel does, does so once after each call of
        the model's ``forward``, and not for other methods. Gradients of further backward passes are recorded here.
        """
        if forward and all(last for each, last in self._open if each is model):
            self._reduced[model] = None
        elif forward:  # the last block reduces these gradients
            return self.gate
        return partial(self._reached, model, forward)

    def _reached(self, model: nn.Module, forward: bool, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._backward is not None:
            reduced = self._reduced.get(model) if forward else 0
            if reduced is None:
                self._reduced[model] = self._backward
            elif reduced != self._backward:
                self._unreduced[model] = None
        return self.gate(gradient)

    def finish(self, bus: Bus, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of ``optimizer`` into unscaled means. Does nothing if they are already.

        Raises RuntimeError if there are no gradients, if the latest block was not the last one, or if one factor cannot
        average all gradients.
        """
        if not self._blocks and not self._plain:
            own = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
            raise WrongState(_OWN_BACKWARD if own else _NO_GRADIENTS)
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
            raise WrongState(_FACTORS.format(type(optimizer).__name__))
        if not all(blocks.last for blocks in mine):
            raise WrongState(_NOT_LAST)
        if self._unreduced:
            self._reduce(bus, parameters)
        self._finished.add(id(optimizer))
        for blocks in mine:
            blocks.stepped = True
        bus.unscale_gradients(optimizer)
        if (factor := factors.pop()) != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def refuse_own_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError if ``optimizer.step()`` would use gradients that are no means yet, or still scaled."""
        if (self._plain or self._blocks) and id(optimizer) not in self._finished and not needs_closure(optimizer):
            raise WrongState(_OWN_STEP.format(type(optimizer).__name__))

    def _reduce(self, bus: Bus, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients that the strategy did not reduce during backward."""
        for model in list(self._unreduced):
            ids = set(map(id, parameters))
            if mine := _held(model, ids):
                with bus.accumulate(model, True):
                    bus.reduce_gradients(model, mine)
            if all(parameter.grad is None for parameter in model.parameters() if id(parameter) not in ids):
                del self._unreduced[model]


def _held(model: nn.Module, parameters: set[int]) -> list[nn.Parameter]:
    """Return the parameters of a model among these (ids)."""
    return [parameter for parameter in model.parameters() if id(parameter) in parameters]


_LOADERS = (
    "Several loaders of setup_data are iterated over, whose batches have other numbers of samples; backward weights a loss by "
    "those of the latest batch. Say the weight of each loss: runtime.backward(loss, weight=data.samples)."
)
_NO_GRADIENTS = (
    "There are no gradients: backward was not called since the last step. Write runtime.backward(loss) before "
    "runtime.clip_gradients(model, optimizer, norm=1.0) and runtime.step(optimizer)."
)
_OWN_BACKWARD = (
    "The gradients are not those of runtime.backward, which weights and scales losses; so they cannot be stepped. Write "
    "runtime.backward(loss) instead of loss.backward()."
)
_OWN_STEP = (
    "{}.step() was called with gradients of runtime.backward, which are neither averaged over microbatches nor unscaled yet. "
    "Write runtime.step(optimizer), which also sets them to None."
)
_NOT_LAST = (
    "A step follows an accumulate block with last=False, so ranks have not exchanged its gradients. Write last=True in the "
    "last block before a step, such as last=number % 4 == 3 or number == len(data) - 1, or step after such blocks only."
)
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
