"""Magnitude pruning on a schedule: the smallest weights become zero, more and more of them, and stay zero.

Source: Zhu and Gupta 2017, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
arXiv 1710.01878, equation 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hocket.basics.time import Interval, Time, Unit
from hocket.errors import WrongValue
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need
from hocket_tools.arguments import check_fraction, checked

if TYPE_CHECKING:
    from hocket.state.state import State

Scope = Literal["layer", "model"]
PRUNED = (nn.Linear, nn.modules.conv._ConvNd)
_TIMES = "Give both as fractions of the duration such as '0.2dur', or both in ep, ba, sp or tok."


def cubic_amount(amount: float, progress: float, initial: float = 0.0) -> float:
    """Return the fraction to prune at a point of the schedule: ``amount + (initial - amount) * (1 - progress)³``.

    Zhu and Gupta 2017, equation 1. Before the schedule, for a negative ``progress``, it is 0; after it, ``amount``.

    Example:
        >>> from hocket_tools.compression.pruning import cubic_amount
        >>> [cubic_amount(0.8, progress) for progress in (-0.1, 0.0, 0.5, 1.0, 2.0)]
        [0.0, 0.0, 0.7000000000000001, 0.8, 0.8]
    """
    return 0.0 if progress < 0 else amount + (initial - amount) * (1 - min(progress, 1.0)) ** 3


@checked
def magnitude_masks(
    weights: Mapping[str, Tensor], amount: float, scope: Scope = "layer", kept: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return masks by name, False for the fraction ``amount`` of the weights that are smallest in magnitude.

    Args:
        weights: tensors by name.
        amount: in [0, 1); of ``n`` weights, ``round(amount * n)`` are pruned.
        scope: ``"layer"`` prunes this fraction of each tensor, ``"model"`` of all together, by one threshold.
        kept: earlier masks: what they prune stays pruned, and counts.

    Raises:
        ValueError: ``amount`` or ``scope`` is out of range.

    Example:
        >>> import torch, hocket_tools
        >>> model = torch.nn.Linear(4, 2)
        >>> masks = hocket_tools.magnitude_masks(dict(model.named_parameters()), amount=0.5)
        >>> [(name, int(mask.sum())) for name, mask in masks.items()]
        [('weight', 4), ('bias', 1)]
    """
    if amount:  # 0 prunes nothing
        check_fraction(0.5, amount=amount)
    if unknown := (kept or {}).keys() - weights.keys():
        raise WrongValue(
            f"magnitude_masks was given kept= for {min(unknown)!r}, and weights= has {', '.join(weights)}. Name masks "
            "as the weights."
        )
    if broken := [name for name, weight in weights.items() if weight.isnan().any()]:
        raise WrongValue(
            f"magnitude_masks was given NaN in {', '.join(broken[:3])}, and NaN has no magnitude. Load earlier weights."
        )
    with torch.no_grad():
        sizes = {name: weight.detach().abs().float().flatten() for name, weight in weights.items()}
        for name, mask in (kept or {}).items():
            sizes[name] = sizes[name].masked_fill(~mask.flatten(), -1.0)  # below every magnitude
        groups = [list(sizes)] if scope == "model" and sizes else [[name] for name in sizes]
        masks: dict[str, Tensor] = {}
        for names in groups:
            together = torch.cat([sizes[name] for name in names])
            mask = torch.ones_like(together, dtype=torch.bool)
            # A stable sort: of equal weights the first ones are pruned, on every rank the same.
            mask[together.argsort(stable=True)[: round(amount * len(together))]] = False
            parts = mask.split([sizes[name].numel() for name in names])
            masks |= {name: part.view(weights[name].shape) for name, part in zip(names, parts, strict=True)}
        return masks


class Pruning(Algorithm):
    """Set the smallest weights to zero, more and more of them (Zhu and Gupta 2017, arXiv 1710.01878, equation 1).

    From ``start`` to ``stop`` the pruned fraction of the weights grows along a cubic curve, from 0 to ``amount``; then the
    others are trained on. Pruned weights stay zero: their gradients, and their state in optimizers such as momentum, are zero,
    and so are their averages (EMA, SWA). The shapes stay the same, so nothing becomes faster by itself: files compress better,
    and sparse kernels and compilers can use the zeros. `hocket_tools.ChannelPruning` makes a model that is really smaller.

    Args:
        amount: the fraction of the weights to prune at last, in (0, 1).
        start, stop: when the fraction begins and ends to grow: both as fractions of the duration, or both in ep, ba, sp or tok.
        interval: the time between two prunings, in batches or epochs.
        scope: ``"layer"`` prunes the same fraction of each layer, ``"model"`` the smallest weights of all layers together.
        keep: patterns of names of layers that are not pruned, such as ``["classifier", "*.head"]``. Weights of linear layers
            and convolutions are pruned; biases, norms and embeddings never.

    Raises:
        ValueError: an argument is out of its range; later, if the model has no such layer, or none that ``keep`` names.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="adamw(lr=0.01)", duration="20ba", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ...     algorithms=[hocket_tools.Pruning(amount=0.75, interval="2ba")],
        ... )
        >>> result = trainer.fit()
        >>> int((model[0].weight == 0).sum()), model[0].weight.numel()
        (96, 128)
    """

    # Masks change before averages are updated, which is on batch_end too.
    events = {Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
    phase = Phase.OPTIMIZER
    once = "Each would undo what the other prunes. Give one of them, with the larger amount."
    needs = Need.FULL_PARAMETERS

    @checked
    def __init__(
        self, amount: float = 0.5, start: str | Time = "0dur", stop: str | Time = "0.5dur", interval: str | Time = "10ba",
        scope: Scope = "layer", keep: Sequence[str] = (),
    ) -> None:  # fmt: skip
        check_fraction(0.5, amount=amount)
        self.start, self.stop = Time.parse(start), Time.parse(stop)
        if not self.start.value:
            self.start = Time(0, self.stop.unit)  # the beginning, in any unit
        if self.start.unit is not self.stop.unit or self.start.unit is Unit.SECOND:
            raise WrongValue(f"Pruning was given «start='{start}'» and «stop='{stop}'». {_TIMES}")
        if not 0 <= self.start.value < self.stop.value or (self.stop.unit is Unit.DURATION and self.stop.value > 1):
            raise WrongValue(f"Pruning was given «start='{start}'» and «stop='{stop}'», which is not later. {_TIMES}")
        self.interval = Time.parse(interval)
        if self.interval.unit not in (Unit.BATCH, Unit.EPOCH) or self.interval.value < 1:
            raise WrongValue(f"Pruning was given «interval='{interval}'». Give batches or epochs: '10ba' or '1ep'.")
        self.amount, self.scope, self.keep = amount, scope, tuple(keep)
        self._due = Interval(self.interval)
        #: By the names of the model's parameters; empty before the first pruning.
        self._masks: dict[str, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        #: The fraction that is pruned.
        self._pruned = 0.0

    # --- on events

    def apply(self, event: Event, state: State) -> None:
        """Prune what is due, or keep pruned weights and their gradients at zero."""
        if event is Event.BEFORE_LOAD:
            layers = [name for name, module in state.model.named_modules() if isinstance(module, PRUNED)]
            check_keep("Pruning", self.keep, layers)
            if not _weights(state.model, self.keep):
                raise WrongValue(
                    f"Pruning found no linear layer and no convolution to prune in {type(state.model).__name__}, besides "
                    f"those that «keep={list(self.keep)}» names. Remove pruning, or keep less."
                )
        elif event is Event.FIT_START:
            self._use_masks(state.model)
        elif event is Event.AFTER_TRAIN_BATCH:
            for parameter, pruned in self._pairs:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(pruned, 0)
        else:
            self._prune(state)

    @hookimpl(wrapper=True)
    def optimizer_step(self, state: State, closure: Callable[[], Tensor]) -> Generator[None, bool, bool]:
        """Set pruned weights to zero again after the step, whatever the optimizer did with them."""
        stepped = yield
        _zero(self._pairs)
        return stepped

    def no_effect(self, state: State) -> str:
        """Return that nothing was pruned, if so."""
        if self._masks:
            return ""
        return (
            f"from «start='{self.start}'» to the end, none of the {state.timestamp.batch} batches is one to prune after, every "
            f"'{self.interval}'. Give an earlier start= or a shorter interval=."
        )

    def _prune(self, state: State) -> None:
        start, stop = float(self.start.value), float(self.stop.value)
        progress = (state.completed(self.start.unit) - start) / (stop - start)
        amount = cubic_amount(self.amount, progress)
        # The last pruning is that of the first batch after `stop`, whatever the interval.
        if amount <= self._pruned or not (progress >= 1 or self._due.due(state.previous, state.timestamp)):
            return
        weights = _weights(state.model, self.keep)
        self._masks = magnitude_masks(weights, amount, self.scope, self._masks)
        self._use_masks(state.model)
        _zero(self._pairs)
        self._zero_state(state)
        self._pruned = amount
        state.log({"pruning/zeros": amount})

    def _use_masks(self, model: nn.Module) -> None:
        """Pair the parameters with what is pruned of them, on their device."""
        weights = _weights(model, self.keep)
        if misfits := [
            name for name, mask in self._masks.items() if name not in weights or weights[name].shape != mask.shape
        ]:
            raise WrongValue(
                f"The masks of pruning do not fit {type(model).__name__}: {', '.join(misfits[:3])} is not a weight of this "
                "shape here. Load the checkpoint without the state of pruning, or give the Trainer the model that was pruned."
            )
        self._masks = {name: mask.to(weights[name].device) for name, mask in self._masks.items()}
        self._pairs = [(weights[name], ~mask) for name, mask in self._masks.items()]

    def _zero_state(self, state: State) -> None:
        """Set what optimizers and averages hold for pruned weights to zero."""
        held: list[tuple[Tensor, Tensor]] = []
        for parameter, pruned in self._pairs:
            values = [each for optimizer in state.optimizers for each in optimizer.state.get(parameter, {}).values()]
            held += [(each, pruned) for each in values if isinstance(each, Tensor) and each.shape == parameter.shape]
        for attachment in state.bus.attachments:
            if attachment.kind == "algorithms" and callable(getattr(attachment.obj, "averaged", None)):
                # The tensors themselves, by the model's names.
                averages = attachment.obj.state_dict().get("averages", {})
                held += [(averages[name], ~mask) for name, mask in self._masks.items() if name in averages]
        _zero(held)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the masks by the model's names, True where a weight is kept, and the pruned fraction."""
        return {"masks": dict(self._masks), "pruned": self._pruned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masks; they are compared with the model when training starts."""
        if state_dict.keys() != {"masks", "pruned"}:
            raise WrongValue(f"A state of Pruning has 'masks' and 'pruned', but this one has {sorted(state_dict)}.")
        self._masks = {name: mask.detach().clone().bool() for name, mask in state_dict["masks"].items()}
        self._pruned = state_dict["pruned"]
        self._pairs = []


def _zero(held: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, pruned in held:
            tensor.masked_fill_(pruned.to(tensor.device), 0)


def _weights(model: nn.Module, keep: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights that may be pruned, by name; shared ones once."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, PRUNED) else None
        if weight is not None and not any(fnmatchcase(name, pattern) for pattern in keep):
            weights.setdefault(id(weight), (f"{name}.weight" if name else "weight", weight))
    return dict(weights.values())


def check_keep(who: str, keep: Sequence[str], layers: Sequence[str]) -> None:
    """Raise ValueError for a pattern that matches no layer."""
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in layers):
            near = difflib.get_close_matches(pattern, layers, 6) or layers[:6]
            raise WrongValue(
                f"{who} was given «keep={list(keep)}», and {pattern!r} matches none of the {len(layers)} layers. Give names or "
                f"patterns of layers, such as {', '.join(map(repr, near))}."
            )
