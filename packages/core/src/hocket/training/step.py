"""One step of the optimizers: from a batch to its gradients, the same however it is cut into microbatches and over ranks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from hocket.data.batches import Counts, map_tensors, unpadded
from hocket.training import weights

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.training.metrics import MetricSet


class Shown(Protocol):
    """What is shown a microbatch, as metrics are."""

    def update(self, outputs: Any, batch: Any) -> None:
        """See a microbatch on its device, and the outputs for it."""


class Step:
    """The batch under way and what came of it. Training has one; evaluations and predictions have one each."""

    __slots__ = (
        "batch", "counts", "gradient_norm", "loss", "loss_names", "losses", "metrics", "outputs", "samples", "trained_on",
        "weight_of",
    )  # fmt: skip

    def __init__(self) -> None:
        #: The batch (see the events for when it is whole, a microbatch, or on the device), and the model's outputs for it.
        self.batch: Any = None
        self.outputs: Any = None
        #: The mean loss of the microbatch under way, with its graph; after_train_batch and later: of the batch, detached.
        self.loss: torch.Tensor | None = None
        #: The named losses that ``loss`` is the sum of, from after_train_batch on.
        self.losses: Mapping[str, torch.Tensor] = {}
        #: Norm of the gradients before clipping, where clipping by norm computed it: a scalar on the device.
        self.gradient_norm: torch.Tensor | None = None
        #: Samples and tokens of the batch as it was handed out, over all ranks.
        self.counts = Counts(0)
        #: Samples that this rank trains on, 0 where it only keeps the others company; and all ranks together.
        self.samples = 0
        self.trained_on = 0
        #: Shown the outputs; None where the gradients of the batch are computed again.
        self.metrics: MetricSet | None = None
        #: The names in ``losses`` that ranks have agreed on; None before the first batch, and where there is one rank.
        self.loss_names: Sequence[str] | None = None
        #: How losses without a weight are weighted, as a function of the batch; None until that matters.
        self.weight_of: Callable[[Any], torch.Tensor | None] | None = None

    def without_batch(self) -> Step:
        """A copy of the numbers alone."""
        taken = copy.copy(self)
        taken.batch = taken.outputs = taken.loss = taken.gradient_norm = None
        taken.losses = {}
        return taken


def count(state: State, batch: Any) -> Counts:
    """What the task says that a batch counts for."""
    counted = state.task.count(batch)
    if isinstance(counted, Counts):
        return counted
    try:
        counts = Counts(*map(operator.index, counted if isinstance(counted, tuple) else (counted,)))
    except TypeError:
        counts = Counts(-1)
    if min(counts) < 0:
        raise ValueError(
            f"count(batch) of {type(state.task).__name__} returned {counted!r}. It returns the number of samples, or (samples, "
            "tokens): integers, 0 or more, such as len(batch[0])."
        )
    return counts


def on_device(number: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A scalar with the device and dtype of ``like``; a Python number gets there without a copy, for which the host waits.

    Of 16 bits it is float32: bfloat16 cannot count to 257, and float16 not beyond 65,504.
    """
    dtype = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
    if isinstance(number, torch.Tensor):
        return number.to(like.device, dtype, non_blocking=like.is_cuda)
    return like.new_full((), number, dtype=dtype)


def compute_gradients(
    state: State, split: Callable[[Any], Sequence[Any]] | None = None, shown: Shown | None = None
) -> None:
    """Leave in ``.grad`` the gradients of the mean loss of the global batch, and that loss in ``state.loss``.

    Each microbatch's loss is multiplied by its share of the samples. Where the loss says that it is a mean over something
    else, what was accumulated is rescaled by what that came to in the end. A batch that is in one piece is not touched, so
    it gives the very bits of a plain loop.

    Where the strategy does not average gradients, those in ``.grad`` are of the mean over this rank's samples, and zero
    where it has none.

    Args:
        split: the batch to its microbatches; None to split it as ``state.microbatch`` says.
        shown: what sees the outputs; None for the metrics of the step.
    """
    bus, step = state.bus, state.step
    mine, everyone, metrics = step.samples, step.trained_on, shown or step.metrics
    bus.before_train_batch(state)
    bus.zero_grad(state)
    whole, world = step.batch, state.strategy.world_size
    world = 1 if world == 1 else state.strategy.data_ranks
    # Strategies take the mean of gradients over ranks with data of their own, hence the number of those.
    per_sample = world / everyone if state.strategy.averages_gradients else 1 / max(mine, 1)
    if split is not None:
        pieces = split(whole)
    else:
        pieces = [whole] if state.microbatch is None else bus.split_batch(state, whole, state.microbatch)
    rescale = None
    if len(pieces) == 1 and world == 1:
        with bus.accumulate(state.prepared, True):
            step.losses = compute_microbatch(state, whole, mine, None, metrics)[3]
    else:
        parts = []
        left = mine
        for number, piece in enumerate(pieces, 1):
            piece, counts = unpadded(piece)
            samples = 0 if not counts else mine if piece is whole else min(mine, count(state, piece).samples)
            left -= samples
            with bus.accumulate(state.prepared, number == len(pieces)):
                parts.append(_Part(*compute_microbatch(state, piece, samples, per_sample, metrics)))
        if left:
            raise ValueError(_lost(state, mine, left))
        rescale = _mean(state, parts, mine, everyone)
    step.batch, step.outputs = whole, None

    for optimizer in state.optimizers:
        bus.unscale_gradients(optimizer)
    if rescale is not None:
        for parameter in state.trained_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(rescale)
    bus.after_train_batch(state)
    norm = bus.clip_gradients(state)
    step.gradient_norm = None if type(norm) is bool else norm


def _lost(state: State, samples: int, left: int) -> str:
    return (
        f"A batch of {samples} samples was split into microbatches that count {samples - left} together, so "
        f"{'some would be lost' if left > 0 else 'some would count twice'}. Check split and count of "
        f"{type(state.task).__name__}: split(batch, size) returns every sample once, and count(batch) counts them alike in the "
        "batch and in its parts."
    )


class _Part(NamedTuple):
    """What is left of a microbatch: its mean loss, the weight of that, whether the loss itself gave it, named losses; or a
    sum, and 1 or 0."""

    value: torch.Tensor
    weight: float | torch.Tensor
    own: bool
    parts: Mapping[str, torch.Tensor]
    summed: bool


def compute_microbatch(
    state: State, batch: Any, samples: int, per_sample: float | None, metrics: Shown | None
) -> tuple[Any, ...]:
    """Forward, loss and backward: what makes a `_Part`. ``per_sample`` multiplies a sample's loss, None for nothing."""
    bus, step = state.bus, state.step
    step.batch = bus.move_batch(state, batch)
    bus.before_forward(state)
    step.outputs = bus.forward(state, step.batch)
    bus.after_forward(state)
    bus.before_loss(state)
    loss = bus.loss(state, step.outputs, step.batch)
    step.loss, own, parts, reduction = loss
    summed = False
    if per_sample is not None:  # else nothing is weighted
        summed = (reduction or state.loss_reduction) == "sum"
        if own is None and not summed:
            weight_of = step.weight_of
            if weight_of is None:
                weight_of = weights.in_training(state, loss, samples or count(state, step.batch).samples)
                step.weight_of = None if weight_of is weights.nothing else weight_of
            own = weight_of(step.batch)
    bus.after_loss(state)
    if metrics is not None and samples:
        metrics.update(step.outputs, step.batch)
    bus.before_backward(state)
    if per_sample is None:
        bus.backward(state, step.loss)
        weight: float | torch.Tensor = samples
    elif summed:
        weight = 1 if samples else 0
        strategy = state.strategy
        _gate(step.outputs, weight)
        bus.backward(state, step.loss * (weight * (strategy.data_ranks if strategy.averages_gradients else 1)))
    else:
        weight = samples if own is None or not samples else own
        if isinstance(weight, torch.Tensor):
            weight = on_device(weight, step.loss)  # a count times a number would be float32
        _gate(step.outputs, weight)
        bus.backward(state, step.loss * (weight * per_sample))
    bus.after_backward(state)
    step.loss = step.loss.detach()
    return step.loss, weight, own is not None and not summed, parts, summed


def _gate(outputs: Any, weight: float | torch.Tensor) -> None:
    """Let no gradient through to the outputs where the weight is 0.

    A mean over nothing is 0 / 0: multiplied by 0, its gradient is still not a number.
    """
    if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":  # the host does not wait for it
        map_tensors(lambda t: t.requires_grad and t.register_hook(lambda g: torch.where(weight != 0, g, 0.0)), outputs)
    elif not weight:
        map_tensors(lambda t: t.requires_grad and t.register_hook(torch.zeros_like), outputs)


def _names(state: State, parts: Sequence[_Part]) -> Sequence[str]:
    """Of the named losses, on all ranks alike: those of the first batch. What one has not is 0, and so is its share of the sum.

    Raises ValueError for one that no rank had in the first batch.
    """
    here = sorted({name for part in parts for name in part.parts})
    if state.strategy.world_size == 1:
        return here
    agreed = state.step.loss_names
    if agreed is None:
        agreed = sorted({name for names in state.bus.all_gather_object(here) for name in names})
        state.step.loss_names = agreed
    if new := [name for name in here if name not in agreed]:
        raise ValueError(
            f"The loss named {', '.join(map(repr, new))} in batch {state.timestamp.batch} was not there in the first batch, "
            f"with {', '.join(map(repr, agreed)) or 'none'}, and ranks add up what they agreed on then. Return it "
            "in every batch, as loss * 0 where there is none."
        )
    return agreed


def _mean(state: State, parts: Sequence[_Part], mine: int, everyone: int) -> torch.Tensor | None:
    """Set the loss of the batch to the weighted mean over its microbatches and ranks.

    Returns what gradients have still to be multiplied by, if losses came with weights of their own.
    """
    names = _names(state, parts)
    nothing: Any = torch.zeros_like(parts[0].value) if names else None
    values = [value for part in parts for value in (part.value, *(part.parts.get(name, nothing) for name in names))]
    own = any(part.own for part in parts)
    here: Any  # what the losses of this rank are means over
    if own:
        stacked = torch.stack(values).view(len(parts), -1)
        each_weight = torch.stack([on_device(part.weight, stacked) for part in parts])
        stacked = stacked.to(each_weight)
        # The mean over nothing, as of a piece of which all tokens are ignored, is not a number and counts nothing.
        here, sums = each_weight.sum(), each_weight @ torch.where(each_weight[:, None] != 0, stacked, 0.0)
    else:  # numbers, which need not go to the device
        each: list[Any] = [part.weight for part in parts for _ in range(1 + len(names))]
        values = [value if weight else torch.zeros_like(value) for value, weight in zip(values, each, strict=True)]
        here = sum(part.weight for part in parts)
        sums = torch.stack(torch._foreach_mul(values, each)).view(len(parts), -1).sum(0)
    if summed := parts[0].summed:
        if not all(part.summed for part in parts):
            raise ValueError(
                "The loss is a sum for some microbatches of a batch and a mean for others. Return one of them."
            )
        here = 1  # the sum is not divided
    total = here
    if state.strategy.world_size > 1:
        packed = torch.cat([on_device(here, sums).view(1), sums])  # float32 where sums are of 16 bits
        reduced = state.bus.all_reduce(packed, "sum")
        # Ranks that compute on the same data have all added it.
        total = state.strategy.world_size // state.strategy.data_ranks if summed else reduced[0]
        sums = reduced[1:]
    state.step.loss, *means = (sums / total).unbind()
    state.step.losses = dict(zip(names, means, strict=True))
    if not own:
        return None
    # Losses of transformers are float32, whatever the model is.
    dtype = torch.promote_types(sums.dtype, state.trained_parameters()[0].dtype)
    if state.strategy.averages_gradients:
        alike = state.strategy.world_size // state.strategy.data_ranks  # have all added the same weight
        return everyone * alike / total.to(dtype)
    return torch.where(here > 0, mine / here.to(dtype), 0.0)  # nothing on this rank may count
