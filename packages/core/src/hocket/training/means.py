"""Compute the mean loss of a global batch as a weighted mean over microbatches and ranks, and scale its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hocket.errors import WrongValue
from hocket.training.weights import CountedLabels

if TYPE_CHECKING:
    from hocket.state import State


class Weighting(NamedTuple):
    """What makes one mean of losses that are means over something each: ``sum(weight * loss) / sum(weight)``.

    Gradients add up before the sum of the weights is known, and strategies take their mean over ranks. So each loss is
    multiplied by `share`, with an estimate of the sum, and in the end the gradients by `correction`.
    """

    #: The estimate, such as the samples of all ranks; and over how many ranks gradients are averaged.
    estimate: float
    ranks: int = 1

    def share(self, weight: Any) -> Any:
        """What to multiply a loss of this weight by before backward; exactly 1 for the only loss there is."""
        if not isinstance(weight, torch.Tensor) and weight * self.ranks == self.estimate:
            return 1.0
        return weight * (self.ranks / self.estimate)

    def correction(self, total: Any) -> Any:
        """What to multiply the gradients by once the sum of the weights of all ranks is known."""
        return self.estimate / total


class Part(NamedTuple):
    """The loss of one microbatch, and its weight.

    ``value`` is a mean, ``weight`` its weight, ``own`` whether the loss function returned that weight, and ``parts`` the named
    losses. With ``summed``, ``value`` is a sum, and ``weight`` is 1, or 0 for padding. ``samples`` is 0 for padding too.
    """

    value: torch.Tensor
    weight: float | torch.Tensor
    own: bool
    parts: Mapping[str, torch.Tensor]
    summed: bool
    samples: int = 0


def on_device(number: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a scalar with the device and dtype of ``like``. A Python number needs no copy for which the host would wait.

    For 16-bit dtypes the scalar is float32: bfloat16 cannot count to 257, and float16 not beyond 65,504.
    """
    dtype = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
    if isinstance(number, torch.Tensor):
        return number.to(like.device, dtype, non_blocking=like.is_cuda)
    return like.new_full((), number, dtype=dtype)


def _names(state: State, parts: Sequence[Part]) -> Sequence[str]:
    """Return the loss names agreed on by all ranks in the first batch. A missing loss counts as 0.

    Raises ValueError for a name that no rank had in the first batch, or if ranks found that other labels count.
    """
    here = sorted({name for part in parts for name in part.parts})
    if state.strategy.world_size == 1:
        return here
    agreed = state.step.loss_names
    if agreed is None:
        counted = state.step.weight_of if isinstance(state.step.weight_of, CountedLabels) else None
        gathered = state.bus.all_gather_object((here, counted))
        agreed = sorted({name for names, _ in gathered for name in names})
        if len(found := {each for _, each in gathered} - {None}) > 1:
            raise WrongValue(
                "The model computes its loss itself. From its values in the first batch, ranks found that it is a mean over "
                f"different labels: {', '.join(sorted(map(str, found)))}. Return it with its weight, (outputs.loss, weight), "
                "where weight is the number of labels that count; or pass «loss_reduction='mean'» to weight it by samples."
            )
        state.step.loss_names = agreed
    if new := [name for name in here if name not in agreed]:
        raise WrongValue(
            f"The loss named {', '.join(map(repr, new))} in batch {state.timestamp.batch} was not there in the first batch, "
            f"with {', '.join(map(repr, agreed)) or 'none'}, and ranks reduce the losses that they agreed on then. Return it "
            "in every batch, as loss * 0 where it does not apply."
        )
    return agreed


def _kinds(parts: Sequence[Part], here: Any, like: torch.Tensor) -> torch.Tensor:
    """Return which kinds of losses there are on this rank: sums, means over samples, and means over another number."""
    flags = on_device(0, like).expand(3).clone()
    counted = [part for part in parts if part.samples]
    if any(part.summed for part in counted):
        flags[0] = 1
    if not all(part.summed or part.own for part in counted):
        flags[1] = 1
    if any(part.own for part in counted):
        flags[2].copy_(torch.as_tensor(here != sum(part.samples for part in counted)))
    return flags


def mean(state: State, parts: Sequence[Part], weighting: Weighting) -> torch.Tensor | None:
    """Set the loss of the batch to the weighted mean over its microbatches and ranks.

    Returns the factor that the gradients still have to be multiplied by, if losses came with their own weights; else None.
    """
    names = _names(state, parts)
    nothing: Any = torch.zeros_like(parts[0].value) if names else None
    values = [value for part in parts for value in (part.value, *(part.parts.get(name, nothing) for name in names))]
    own = any(part.own for part in parts)
    here: Any  # total weight on this rank
    if own:
        stacked = torch.stack(values).view(len(parts), -1)
        each_weight = torch.stack([on_device(part.weight, stacked) for part in parts])
        stacked = stacked.to(each_weight)
        # A mean with weight 0, as of a microbatch in which all tokens are ignored, is NaN and must not count.
        here, sums = each_weight.sum(), each_weight @ torch.where(each_weight[:, None] != 0, stacked, 0.0)
    else:  # the weights are Python numbers, which need no transfer to the device
        each: list[Any] = [part.weight for part in parts for _ in range(1 + len(names))]
        values = [value if weight else torch.zeros_like(value) for value, weight in zip(values, each, strict=True)]
        here = sum(part.weight for part in parts)
        weighted = [value * weight for value, weight in zip(values, each, strict=True)]
        sums = torch.stack(weighted).view(len(parts), -1).sum(0)
    # Whether losses may be of several kinds; most steps on one rank need no look.
    compared = state.strategy.world_size > 1 or (own and not all(part.own for part in parts))
    flags: Any = _kinds(parts, here, sums) if compared else None
    if summed := parts[0].summed:
        if not all(part.summed for part in parts):
            raise WrongValue(
                "The loss is a sum for some microbatches of a batch and a mean for others. Return one of them."
            )
        here = 1  # the sum is not divided
    total = here
    if state.strategy.world_size > 1:
        packed = torch.cat([flags, on_device(here, sums).view(1), sums])  # float32 if the sums are 16-bit
        flags, reduced = state.bus.all_reduce(packed, "sum").split([len(flags), 1 + len(sums)])
        # Ranks that compute on the same data each contributed to the sum.
        total = state.strategy.world_size // state.strategy.data_ranks if summed else reduced[0]
        sums = reduced[1:]
    if compared:
        different = (flags > 0).sum() > 1
        if different.is_cuda:  # The host does not wait. The loss is NaN, which the guard of non-finite losses finds.
            sums = torch.where(different, torch.nan, sums)
        elif different:
            raise WrongValue(
                "The loss is a mean over samples for some microbatches or ranks, and for others a sum, or a mean with its own "
                "weight, such as cross-entropy over labels of which some are ignored. So it has no mean. Return the same kind "
                "in every microbatch: where a term does not apply, multiply it by 0; or return (mean, weight) in each."
            )
    state.step.loss, *means = (sums / total).unbind()
    state.step.losses = dict(zip(names, means, strict=True))
    if not own:
        return None
    # Losses of transformers are float32, whatever the model's dtype.
    dtype = torch.promote_types(sums.dtype, state.parameters[0].dtype)
    if state.strategy.averages_gradients:
        replicas = state.strategy.world_size // state.strategy.data_ranks  # each of them contributed the same weight
        return torch.as_tensor(weighting.correction(total.to(dtype) / replicas))
    return torch.where(here > 0, weighting.correction(here.to(dtype)), 0.0)  # the weight on this rank may be 0
