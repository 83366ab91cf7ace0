"""How the loss of a microbatch is weighed, such that a batch has one loss and one gradient however it is divided.

A batch is divided into microbatches and over ranks. Its loss is ``sum(weight * loss) / sum(weight)`` over these parts, or
``sum(loss)`` for a loss that is declared to be a sum. What a part counts for depends on the kind of its loss:

==========  ================================================  ====================================  ==========================
`Kind`      a loss that is                                    weight                                factor before backward
==========  ================================================  ====================================  ==========================
SAMPLES     a mean over samples; a loss of the whole batch;   the samples of the microbatch         weight * ranks / total
            a sum of means under loss_reduction="mean"        that count
ELEMENTS    a mean over a number of its own: it returned      that number                           weight * ranks / total;
            that weight, or labels, a mask, … (below)                                               in the end gradients *
                                                                                                    total / sum(weight over
                                                                                                    all ranks)
SUM         a sum over samples                                1; 0 for a padding microbatch         weight * ranks
==========  ================================================  ====================================  ==========================

``total`` is the number of samples of the full batch over all ranks (``step.trained_on``). Strategies average gradients over
ranks with different data, hence ``ranks``; with a strategy that does not, ``total`` and sums are those of this rank, and
``ranks`` is 1. The sum of the weights of ELEMENTS is known only after the last microbatch, hence the `Weighting.correction` of
all gradients in the end. A batch that is not divided is not weighed: its loss is multiplied by nothing, so that its gradients
are bitwise those of a plain loop.

Padding, a microbatch on a rank that has no samples left, has weight 0 and is of no kind. Its gradient is stopped at the
outputs of the model, because a mean over nothing may be NaN; in steps of `train_batch`, whose outputs are not known, the loss
is replaced by one of value 0.

What an ELEMENTS loss is a mean over, `weigh` learns in this order:

1. the loss function says it: ``(mean, weight)`` or `hocket.Loss`;
2. it called torch's cross-entropy or NLL loss: the labels that count (`hocket.state.loss_divisors`);
3. it divided a sum by another, such as a mask's, or averaged selected elements, and a trial confirms that this is the weight;
   or the model computes its loss itself, and it equals a usual one (`hocket.loop.inferred_weights`). Otherwise it is SAMPLES.

``loss_reduction="mean"`` uses a loss as it is: sums of means and divisions are SAMPLES, and nothing is tried. A weight that the
loss states, the labels of a single cross-entropy and those of a model's own loss still count.

The order of a step is that of `hocket.loop.actions`: `weigh` and `Weighting.factor` for each microbatch, `mean` at the end.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from hocket.basics.dtensors import mesh_of
from hocket.basics.losses import WHOLE, Loss
from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue
from hocket.hookspecs.strategies import replicas
from hocket.loop import inferred_weights
from hocket.loop.whole_batch import check_part
from hocket.state.known_weights import CountedLabels

if TYPE_CHECKING:
    from hocket.state.state import State


class Kind(enum.Enum):
    """What a loss is over; see above."""

    SAMPLES = enum.auto()
    ELEMENTS = enum.auto()
    SUM = enum.auto()


class Weight(NamedTuple):
    """What the loss of a microbatch counts for. The amount is 0 for padding."""

    kind: Kind
    amount: float | torch.Tensor

    def on_device(self, like: torch.Tensor) -> Weight:
        """Return it as a scalar on the device of ``like``, if it is a tensor."""
        if isinstance(self.amount, torch.Tensor):  # an integer tensor times a Python float would be float32
            return self._replace(amount=on_device(self.amount, like))
        return self

    @property
    def is_known_zero(self) -> bool:
        """Whether it is known to be 0 without waiting for a device."""
        amount = self.amount
        return not amount if not isinstance(amount, torch.Tensor) else amount.device.type == "cpu" and not amount.item()


class Weighting(NamedTuple):
    """What turns the losses of parts into one mean: a factor for each loss, and one for all gradients in the end."""

    #: The estimate of the sum of all weights, such as the samples of all ranks; and over how many ranks gradients are averaged.
    estimate: float
    ranks: int = 1

    def factor(self, weight: Weight) -> float | torch.Tensor:
        """Return what to multiply a loss of this weight by before backward; exactly 1 for the only loss there is."""
        return weight.amount * self.ranks if weight.kind is Kind.SUM else self.share(weight.amount)

    def share(self, amount: float | torch.Tensor) -> float | torch.Tensor:
        """As `factor`, for the weight of a mean."""
        if not isinstance(amount, torch.Tensor) and amount * self.ranks == self.estimate:
            return 1.0
        return amount * (self.ranks / self.estimate)

    def correction(self, total: float | torch.Tensor) -> float | torch.Tensor:
        """Return what to multiply the gradients by, once the sum of the weights of all ranks is known."""
        return self.estimate / total


class Part(NamedTuple):
    """The loss of one microbatch, without its graph, with its weight and the named losses in it.

    ``samples``: the number that counts, 0 for padding.
    """

    value: torch.Tensor
    weight: Weight
    named: Mapping[str, torch.Tensor]
    samples: int


def on_device(number: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a scalar with the device and dtype of ``like``. A Python number needs no copy for which the host would wait.

    For 16-bit dtypes the scalar is float32: bfloat16 cannot count to 257, and float16 not beyond 65,504.
    """
    dtype = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
    if isinstance(number, torch.Tensor):
        return number.to(like.device, dtype, non_blocking=like.is_cuda)
    return like.new_full((), number, dtype=dtype)


# --- one microbatch


def weigh(state: State, loss: Loss, samples: int) -> Weight:
    """Return what the loss of the current microbatch counts for.

    Args:
        loss: as the action `loss` or the step's loss function returned it.
        samples: the number in the microbatch that counts; 0 for padding.

    Raises:
        ValueError: it cannot be divided, or what it is a mean over cannot be determined.
        PlanError: it is one of the whole batch, and this is a part of it.
    """
    step, over = state.step, loss.reduction or state.loss_reduction
    if over == "sum":
        return Weight(Kind.SUM, 1 if samples else 0)
    if over in WHOLE:
        check_part(state, over, samples)
    amount = loss.weight
    if amount is None:
        determine = partial(inferred_weights.in_training, state, loss, samples)
        amount = inferred_weights.weight(state, step.weighing, determine)
    else:
        inferred_weights.check_composed(state, samples)
    return Weight(Kind.SAMPLES, samples) if amount is None else Weight(Kind.ELEMENTS, amount if samples else 0)


def stop_gradients_of_nothing(outputs: object, weight: Weight) -> None:
    """Zero the gradients of the outputs if the weight is 0.

    A mean over no samples is NaN, and 0 times its gradient is NaN too.
    """
    amount = weight.amount
    if not isinstance(amount, torch.Tensor) and amount:
        return

    def gated(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # of outputs that compiled code does not use
            return None
        if not isinstance(amount, torch.Tensor):
            return torch.zeros_like(gradient)
        return torch.where(amount != 0, gradient, 0.0)  # compared on the device, without a sync

    map_tensors(lambda output: output.requires_grad and output.register_hook(gated), outputs)


def zero_loss(state: State, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that counts nothing and reaches every parameter, in place of a mean over nothing, whose gradient is NaN."""
    trained = [parameter for parameter in state.trained_parameters() if parameter.requires_grad]
    if any(mesh_of(parameter) is not None for parameter in trained):
        return loss * 0
    return torch.stack([parameter.reshape(-1)[:1].sum() * 0 for parameter in trained]).sum().to(loss)


# --- the end of the batch


def mean(state: State, parts: Sequence[Part], weighting: Weighting) -> torch.Tensor | None:
    """Set the loss of the batch, and its named losses, to the weighted means over microbatches and ranks.

    Returns what the gradients still have to be multiplied by (`Weighting.correction`) if losses are of `Kind.ELEMENTS`; else
    None.
    """
    strategy = state.strategy
    names = _names(state, parts)
    elements = any(part.weight.kind is Kind.ELEMENTS for part in parts)
    summed = parts[0].weight.kind is Kind.SUM
    sums, weight = _weighted_sums(parts, names, elements)
    # Whether losses may be of several kinds; most steps on one rank need no look.
    compared = strategy.world_size > 1 or (elements and not all(part.weight.kind is Kind.ELEMENTS for part in parts))
    kinds = _kinds(parts, weight, sums) if compared else None
    if summed:
        if not all(part.weight.kind is Kind.SUM for part in parts):
            raise WrongValue(
                "The loss is a sum for some microbatches of a batch and a mean for others. Return one of them."
            )
        weight = 1  # the sum is not divided
    total = weight
    if strategy.world_size > 1:
        assert kinds is not None
        packed = torch.cat([kinds, on_device(weight, sums).view(1), sums])  # float32 if the sums are 16-bit
        kinds, total_and_sums = state.bus.all_reduce(packed, "sum").split([len(kinds), 1 + len(sums)])
        # Ranks that compute on the same data each contributed to the sum.
        total = replicas(strategy) if summed else total_and_sums[0]
        sums = total_and_sums[1:]
    if kinds is not None:
        sums = _unless_different(kinds, sums)
    state.step.loss, *means = (sums / total).unbind()
    state.step.losses = dict(zip(names, means, strict=True))
    if not elements:
        # Decided without the other ranks: if their losses are of ELEMENTS, either these are as many as samples, so that the
        # correction is 1, or `_unless_different` has found two kinds.
        return None
    # Losses of transformers are float32, whatever the model's dtype.
    dtype = torch.promote_types(sums.dtype, state.parameters[0].dtype)
    if strategy.averages_gradients:
        # Ranks that compute on the same data each contributed the same weight.
        return torch.as_tensor(weighting.correction(torch.as_tensor(total).to(dtype) / replicas(strategy)))
    weight = torch.as_tensor(weight)
    return torch.where(weight > 0, weighting.correction(weight.to(dtype)), 0.0)  # a rank may have none


def _weighted_sums(
    parts: Sequence[Part], names: Sequence[str], elements: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Return this rank's weighted sums of the loss and then the named losses, and its total weight."""
    values: list[torch.Tensor] = []
    for part in parts:
        named = part.named
        values.append(part.value)
        values += [named[name] if name in named else torch.zeros_like(part.value) for name in names]
    if elements:
        stacked = torch.stack(values).view(len(parts), -1)
        amounts = torch.stack([on_device(part.weight.amount, stacked) for part in parts])
        stacked = stacked.to(amounts)
        # A mean with weight 0, as of a microbatch in which all tokens are ignored, is NaN and must not count.
        return amounts @ torch.where(amounts[:, None] != 0, stacked, 0.0), amounts.sum()
    # The weights are Python numbers, which need no transfer to the device.
    numbers = [part.weight.amount for part in parts for _ in range(1 + len(names))]
    values = [value if number else torch.zeros_like(value) for value, number in zip(values, numbers, strict=True)]
    weighted = [value * number for value, number in zip(values, numbers, strict=True)]
    return torch.stack(weighted).view(len(parts), -1).sum(0), sum(part.weight.amount for part in parts)


def _kinds(parts: Sequence[Part], weight: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return which kinds of losses there are on this rank: sums, means over samples, and means over another number.

    Args:
        weight: the total weight on this rank.
    """
    flags = on_device(0, like).expand(3).clone()
    kinds = {part.weight.kind for part in parts if part.samples}
    flags[0], flags[1] = Kind.SUM in kinds, Kind.SAMPLES in kinds
    if Kind.ELEMENTS in kinds:
        flags[2].copy_(torch.as_tensor(weight != sum(part.samples for part in parts)))
    return flags


def _unless_different(kinds: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the sums. Raises ValueError if losses are of different kinds, on any rank."""
    different = (kinds > 0).sum() > 1
    if different.is_cuda:  # The host does not wait. The loss is NaN, which the guard of non-finite losses finds.
        return torch.where(different, torch.nan, sums)
    if different:
        raise WrongValue(
            "The loss is a mean over samples for some microbatches or ranks, and for others a sum, or a mean with its own "
            "weight, such as cross-entropy over labels of which some are ignored. So it has no mean. Return the same kind "
            "in every microbatch: where a term does not apply, multiply it by 0; or return (mean, weight) in each."
        )
    return sums


def _names(state: State, parts: Sequence[Part]) -> Sequence[str]:
    """Return the loss names agreed on by all ranks in the first batch. A missing loss counts as 0.

    Raises ValueError for a name that no rank had in the first batch, or if ranks found that other labels count.
    """
    names = sorted({name for part in parts for name in part.named})
    if state.strategy.world_size == 1:
        return names
    known = state.step.weighing
    if known.names is None:
        labels = known.mean_over if isinstance(known.mean_over, CountedLabels) else None
        gathered = state.bus.all_gather_object((names, labels))
        known.names = sorted({name for of_rank, _ in gathered for name in of_rank})
        if len(different := {labels for _, labels in gathered} - {None}) > 1:
            raise WrongValue(
                "The model computes its loss itself. From its values in the first batch, ranks found that it is a mean over "
                f"different labels: {', '.join(sorted(map(str, different)))}. Return it with its weight, (outputs.loss, "
                "weight), where weight is the number of labels that count; or pass «loss_reduction='mean'» to weight it by "
                "samples."
            )
    if new := [name for name in names if name not in known.names]:
        raise WrongValue(
            f"The loss named {', '.join(map(repr, new))} in batch {state.timestamp.batch} was not there in the first batch, "
            f"with {', '.join(map(repr, known.names)) or 'none'}, and ranks reduce the losses that they agreed on then. Return "
            "it in every batch, as loss * 0 where it does not apply."
        )
    return known.names
