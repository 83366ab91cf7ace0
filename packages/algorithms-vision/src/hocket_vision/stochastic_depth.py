"""Stochastic depth: drop residual branches at random in training, deeper ones more often.

Source: Huang, Sun, Liu, Sedra and Weinberger 2016, "Deep Networks with Stochastic Depth", arXiv 1603.09382, equations 2, 4
and 5. Dropping the branch of each sample on its own is that of :func:`torchvision.ops.stochastic_depth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from hocket.basics.time import Time, TimeError, Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.step import count
from hocket.surgery import NoEffectWarning, Policy, Replacement, replace_modules
from hocket_vision.branch_drop import BranchDrop, Method, WithStochasticDepth, plain_class, scale_end
from hocket_vision.extended_forward import extended
from hocket_vision.residual_blocks import end_of, known_class, residual_of

if TYPE_CHECKING:
    from hocket.state.state import State

Distribution = Literal["linear", "uniform"]


def drop_rates(blocks: int, drop_rate: float = 0.2, distribution: Distribution = "linear") -> list[float]:
    """Return the drop rate of each block: the same for ``"uniform"``, ``(i + 1) / blocks * drop_rate`` for ``"linear"``.

    arXiv 1603.09382, equation 4.

    Example:
        >>> from hocket_vision.stochastic_depth import drop_rates
        >>> drop_rates(4, 0.2)
        [0.05, 0.1, 0.15000000000000002, 0.2]
    """
    return [drop_rate * ((i + 1) / blocks if distribution == "linear" else 1) for i in range(blocks)]


@dataclass(frozen=True)
class _Choice:
    """The blocks to extend, and how."""

    drop_rate: float
    method: Method
    distribution: Distribution
    blocks: tuple[str, ...] | None
    rescale: bool

    def __post_init__(self) -> None:
        if not 0 <= self.drop_rate < 1:
            raise WrongValue(f"drop_rate is {self.drop_rate}: give a probability in [0, 1), such as 0.2.")
        for name, given, allowed in (
            ("method", self.method, Method),
            ("distribution", self.distribution, Distribution),
        ):
            if given not in get_args(allowed):
                raise WrongValue(f"{name} is {given!r}: give {' or '.join(map(repr, get_args(allowed)))}.")

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the outermost blocks by name, in the order of registration; those that were extended before, too."""
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if name and not inside and self._wants(name, module):
                found[name] = module
        return found

    def _wants(self, name: str, module: nn.Module) -> bool:
        if self.blocks is None:
            return known_class(module, plain_class(module)) is not None
        return any(fnmatchcase(plain_class(module).__name__, each) or fnmatchcase(name, each) for each in self.blocks)

    def rates(self, blocks: dict[str, nn.Module]) -> dict[str, float]:
        return dict(zip(blocks, drop_rates(len(blocks), self.drop_rate, self.distribution), strict=True))


def _choice(
    drop_rate: float, method: Method, distribution: Distribution, blocks: str | Sequence[str] | None, rescale: bool
) -> _Choice:
    patterns = (blocks,) if isinstance(blocks, str) else None if blocks is None else tuple(blocks)
    return _Choice(drop_rate, method, distribution, patterns, rescale)


def stochastic_depth(
    model: nn.Module,
    *,
    drop_rate: float = 0.2,
    method: Method = "block",
    distribution: Distribution = "linear",
    blocks: str | Sequence[str] | None = None,
    rescale: bool = False,
) -> tuple[nn.Module, list[Replacement]]:
    """Have residual blocks drop their branch at random in training, in place.

    In training a block ``activation(branch(x) + shortcut(x))`` is ``activation(shortcut(x))`` with the probability of its
    drop rate, for the whole batch or for each sample. In evaluation the branch is multiplied by its probability to be kept.
    A skipped block is not computed; its parameters get gradients of 0. Decisions are drawn from torch's default generators,
    in each forward pass.

    Blocks keep their class (the new one is a subclass), parameters (the same objects), hooks and ``state_dict`` keys. Blocks
    that have stochastic depth already get the new settings.

    Args:
        model: any module; only its submodules are replaced.
        drop_rate: the probability to drop the last block.
        method: ``"block"`` skips a block for the whole batch; ``"sample"`` drops the branch of each sample on its own.
        distribution: ``"linear"``: block ``l`` of ``L`` has the rate ``l / L * drop_rate``; ``"uniform"``: all have the same.
        blocks: patterns (:mod:`fnmatch`) of class names or module names, such as ``"GPT2Block"`` or ``"encoder.layers.*"``;
            by default the residual blocks of torchvision's and timm's ResNets and vision transformers, of
            ``torch.nn.TransformerEncoder`` and of :func:`small_resnet`. Of nested blocks the outer one is taken. Classes
            other than these must return their input plus a residual branch, in the same shape.
        rescale: divide the branch by its probability to be kept in training instead, as
            :func:`torchvision.ops.stochastic_depth` does; in evaluation the model is then the plain one.

    Returns:
        The model and a record of each replacement, with ``new`` the same as ``old`` for blocks that had stochastic depth; the
        list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: an argument is out of range; later, in a forward pass, if a block is not of this form.
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> from hocket_vision import small_resnet
        >>> from hocket_vision.functional import stochastic_depth
        >>> model, replaced = stochastic_depth(small_resnet(), drop_rate=0.3)
        >>> [block.new.stochastic_depth.rate for block in replaced]
        [0.09999999999999999, 0.19999999999999998, 0.3]
    """
    return model, _operate(model, _choice(drop_rate, method, distribution, blocks, rescale))


def _operate(model: nn.Module, choice: _Choice) -> list[Replacement]:
    found = choice.find(model)
    rates = choice.rates(found)
    had = [name for name, block in found.items() if isinstance(block, WithStochasticDepth)]
    names = {block: name for name, block in found.items() if name not in had}

    def build(block: nn.Module, index: int) -> nn.Module:
        new, name = extended(block, WithStochasticDepth), names[block]
        new.stochastic_depth = BranchDrop(
            name, rates[name], choice.method, choice.rescale, residual_of(block, type(block))
        )
        return new

    changed = replace_modules(model, {nn.Module: Policy(build, names.__contains__)})
    for replacement in changed:
        assert isinstance(replacement.new, WithStochasticDepth)
        scale_end(replacement.new, replacement.new.stochastic_depth)
    for name in had:
        block, drop = found[name], found[name].get_submodule("stochastic_depth")
        assert isinstance(drop, BranchDrop)
        drop.name, drop.rate, drop.method, drop.rescale = name, rates[name], choice.method, choice.rescale
        changed.append(Replacement(name, block, block, model))
    if not changed:
        looked = (
            "residual block that it knows" if choice.blocks is None else f"module that matches {list(choice.blocks)}"
        )
        warn(
            f"Stochastic depth found nothing to change in {type(model).__name__}: no {looked}. Name the class of its residual "
            "blocks, such as «blocks='*Block'», or remove stochastic-depth.",
            NoEffectWarning,
        )
    return changed


class StochasticDepth(Algorithm):
    """Drop residual branches at random in training, deeper ones more often (Huang et al. 2016, arXiv 1603.09382).

    Extends residual blocks, once, before optimizers exist; see :func:`stochastic_depth` for the other arguments. What to drop
    is decided once for each batch, whatever its microbatches: the same blocks on all ranks, or with ``method="sample"``
    other samples on each. Logs ``stochastic-depth/blocks``, and during the warm-up ``stochastic-depth/drop_rate``, the rate of
    the last block.

    Args:
        warmup: time in which the rates rise linearly from 0, such as ``"0.2dur"`` or ``"500ba"``; None for none. Fractions
            advance by batch.

    Raises:
        ValueError: an argument is out of range.
        TimeError: ``warmup`` is in seconds.

    Example:
        >>> import hocket, hocket_vision
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), device="cpu",
        ...     algorithms=[hocket_vision.StochasticDepth(drop_rate=0.2, warmup="0.1dur")],
        ... )
        >>> trainer.state.model.get_submodule("stage3.0.stochastic_depth")
        BranchDrop(rate=0, method='block')
    """

    events = {
        Event.INIT, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.BATCH_END, Event.EXCEPTION,
    }  # fmt: skip
    phase = Phase.MODEL

    def __init__(
        self,
        drop_rate: float = 0.2,
        method: Method = "block",
        distribution: Distribution = "linear",
        warmup: str | Time | None = None,
        blocks: str | Sequence[str] | None = None,
        rescale: bool = False,
    ) -> None:
        self._choice = _choice(drop_rate, method, distribution, blocks, rescale)
        self.warmup = None if warmup is None else Time.parse(warmup)
        if self.warmup is not None and self.warmup.unit is Unit.SECOND:
            raise TimeError(
                f"«warmup='{warmup}'» is in seconds. Write a fraction of the duration such as '0.2dur', or batches."
            )
        #: The blocks, with their rates after the warm-up, and the part of the warm-up that is over.
        self._drops: list[tuple[BranchDrop, float]] = []
        self._reached = 0.0 if self.warmup is not None and self.warmup.value else 1.0
        #: Uniform random numbers for each sample of the current batch and each block, drawn as samples are seen.
        self._draws = torch.empty(0)
        self._generator = torch.Generator()
        #: The batch, or the part of it, whose gradients are computed; its first sample, and the samples seen so far.
        self._part = 0
        self._first = self._seen = 0

    def apply(self, event: Event, state: State) -> None:
        """Extend the blocks, set their rates, and decide for each batch."""
        match event:
            case Event.INIT:
                changed = _operate(state.model, self._choice)
                state.replacements += changed
                drops = [replacement.new.get_submodule("stochastic_depth") for replacement in changed]
                self._drops = [(drop, drop.rate) for drop in drops if isinstance(drop, BranchDrop)]
                self._set_rates(self._reached)
                state.log({"stochastic-depth/blocks": len(changed)})
            case Event.BATCH_START:
                self._warm_up(state)
                self._begin_batch(state)
            case Event.BEFORE_TRAIN_BATCH:
                self._begin_part(state)
            case Event.BEFORE_FORWARD:
                if self._choice.method == "sample" and self._drops:
                    self._decide_by_sample(state)
            case Event.BATCH_END:
                self._warm_up(state)  # evaluation follows
                self._end_batch()
            case _:
                self._end_batch()

    def _set_rates(self, reached: float) -> None:
        self._reached = reached
        for drop, rate in self._drops:
            drop.rate = reached * rate

    def _warm_up(self, state: State) -> None:
        if self.warmup is None or not self.warmup.value:
            return
        self._set_rates(min(1.0, state.completed(self.warmup.unit) / self.warmup.value))
        if self._drops:
            state.log({"stochastic-depth/drop_rate": max(drop.rate for drop, _ in self._drops)})

    def _begin_batch(self, state: State) -> None:
        if self._choice.method == "sample":
            # A generator of its own for each batch: the search for a microbatch size restores those of the state.
            seed = torch.randint(2**62, (), generator=state.generator(self, per_rank=True))
            self._generator.manual_seed(int(seed))
            self._draws = torch.empty(0, len(self._drops))
            self._part, self._first, self._seen = 0, 0, 0
        elif self._drops:
            draws = torch.rand(len(self._drops), generator=state.generator(self)).tolist()
            self._decide([draw >= drop.rate for draw, (drop, _) in zip(draws, self._drops, strict=True)])

    def _begin_part(self, state: State) -> None:
        """Return to the first sample of the batch or part; a second pass over the same one, such as SAM's, draws the same."""
        if state.step.part != self._part:
            self._first = self._seen
        self._part, self._seen = state.step.part, self._first

    def _decide_by_sample(self, state: State) -> None:
        first, self._seen = self._seen, self._seen + count(state, state.batch).samples
        if (missing := self._seen - len(self._draws)) > 0:
            self._draws = torch.cat([self._draws, torch.rand(missing, len(self._drops), generator=self._generator)])
        rates = torch.tensor([drop.rate for drop, _ in self._drops])
        keep = (self._draws[first : self._seen] >= rates).to(state.device, non_blocking=True)
        self._decide(keep.unbind(1))

    def _end_batch(self) -> None:
        self._decide([None] * len(self._drops))

    def _decide(self, decisions: Sequence[bool | Tensor | None]) -> None:
        for (drop, _), decision in zip(self._drops, decisions, strict=True):
            drop.decision = decision

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the warm-up that is over, 0 to 1."""
        return {"reached": self._reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rates. Raises ValueError for an unknown key."""
        if state_dict.keys() != {"reached"}:
            raise WrongValue(f"The state of StochasticDepth has the key 'reached', but was given {sorted(state_dict)}.")
        self._set_rates(state_dict["reached"])

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each block that would be extended, with its final rate."""
        found = self._choice.find(model)
        lines = []
        for name, rate in self._choice.rates(found).items():
            residual = residual_of(found[name], plain_class(found[name]))
            part = "the block" if residual is None else f"the branch up to {end_of(found[name], residual)}"
            lines.append(f"{name}: {plain_class(found[name]).__name__} drops {part} with probability {rate:.4g}")
        return lines
