"""Determine, once and if needed, how to weight a loss whose calls do not say what it is a mean over.

A batch that is not split, on one rank, needs no weights. Several microbatches or ranks do, and so does an evaluation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.data import batches, nesting
from hocket.errors import WrongValue
from hocket.help import names, warn
from hocket.losses import WHOLE, Loss, as_loss, own_loss
from hocket.task import SupervisedTask
from hocket.training.divisors import weighed
from hocket.training.step import count

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.training.step import Step
    from hocket.types import Batch

_WITH_WEIGHT = (
    "or return it with its weight: «loss=lambda outputs, batch: (outputs.loss, (batch['labels'] != -100).sum())»; "
)
_IN_TASK = "or return (outputs.loss, weight) in the task's loss(outputs, batch), where weight is the number of elements in it; "
_TASK = " For models of transformers there is hocket_nlp.HuggingFaceTask(model)."
#: Returns the weight of a batch's loss; None for its number of samples.
Weight = Callable[[Any], Any]


def by_samples(batch: Batch) -> None:
    """The loss is a mean over samples."""
    return None


def nothing(batch: Batch) -> Tensor:
    """The loss is a mean over no label at all; a later batch will show how to weight it."""
    return torch.zeros((), dtype=torch.int64)


def by_divisor(batch: Batch) -> None:
    """The loss is a mean that was written by hand, and ``state.step.divisor`` the number of its elements. See `weight`."""


def weight(state: State, weight_of: Weight) -> Any:
    """Return the weight of the current loss; None for its number of samples.

    Raises:
        ValueError: the loss was a mean over selected elements in an earlier batch, and is not in this one.
    """
    divisor = state.step.divisor
    if weight_of is by_divisor and divisor is None:
        raise WrongValue(
            "The loss was a mean over selected elements, such as (loss * mask).sum() / mask.sum(), in an earlier batch, and is "
            "not in this one. Compute it in the same way in every batch, or return (mean, weight), where weight is the number "
            "of its elements."
        )
    return (
        divisor if weight_of is by_divisor or (weight_of is nothing and divisor is not None) else weight_of(state.batch)
    )


def _divided(state: State, samples: int) -> Weight | None:
    """Return `by_divisor` if the loss is a mean over as many elements as it is divided by, `nothing` if there are none."""
    found = None if state.step.divisor is None or state.loss_reduction is not None else tried(state, samples, True)
    if found == "mean":  # perhaps only in a batch without padding, if it is added to a mean over samples
        state.step.tried = max(state.step.tried, 1)
    return {"mean": by_divisor, "nothing": nothing}.get(found or "")


def in_training(state: State, loss: Loss, samples: int) -> Weight:
    """Return how to weight the losses of microbatches and ranks, determined on the first that is not `nothing`.

    Args:
        samples: samples in ``state.batch``.

    Raises:
        ValueError: the loss is a sum over samples; or the model computes it, and its weight cannot be determined.
    """
    if (loss.reduction or state.loss_reduction) in WHOLE:
        return by_samples
    if own_loss(state.outputs) is loss.value:
        weight = of_own_loss(state.outputs, state.batch, state.model)
        if weight is None and state.loss_reduction == "mean":
            return by_samples
        if weight is None:
            supervised = type(state.task) is SupervisedTask
            raise WrongValue(
                f"{type(state.model).__name__} computes its loss itself, and it is not certain what that is a mean over, so "
                "microbatches and ranks cannot be given weights. Pass «loss_reduction='mean'» to weight it by samples; "
                + (_WITH_WEIGHT if supervised else _IN_TASK)
                + "or train on one rank without «microbatch=» and «accumulate=»."
                + (_TASK if supervised and names.library(state.model) == "transformers" else "")
            )
        return weight
    if state.loss_reduction is None:
        if (weight := _divided(state, samples)) is not None:
            return weight
        check_composed(state, samples)
    return by_samples


def check_composed(state: State, samples: int) -> bool:
    """Try whether the loss is a mean. Raise ValueError for a sum, and warn if it is neither.

    Returns False if no label counts in the batch, so that a later one has to be tried.
    """
    if state.loss_reduction is not None:
        return True
    found = tried(state, samples)
    step = state.step
    # A batch without padding does not show that a mean written by hand is over selected elements.
    step.tried = max(step.tried, 1) if found == "mean" and not (step.seen and step.seen.certain) else 0
    if found == "sum":
        raise WrongValue(
            "The loss of a sample given twice is twice its loss, so this is a sum over samples and not a mean: if a batch "
            "is split into microbatches or divided over ranks, the two differ. If you mean the sum, pass "
            "«loss_reduction='sum'» to the Trainer, or return hocket.Loss(value, reduction='sum'). Else take the mean, "
            "for instance with «reduction='mean'»; «loss_reduction='mean'» uses the loss as it is."
        )
    if found == "neither":
        warn(
            "The loss of several samples is not the mean of their losses, so a batch that is split into microbatches or "
            "divided over ranks has another loss than the full batch: the mean of the parts, weighted by samples. If the "
            "loss is a mean over something else, such as labels that count, return (mean, weight); if it is over pairs of "
            "the batch, as a contrastive loss, say «loss_reduction='batch'», which refuses to divide batches; if this is "
            "intended, pass «loss_reduction='mean'» to the Trainer."
        )
    return found != "nothing"


def try_again(step: Step) -> None:
    """Have a loss tried again in the 2nd, 4th, 8th, … divided batch, unless it is certain what it is a mean over."""
    step.tried += 1
    if not step.tried & (step.tried - 1) and step.weight_of in (by_samples, by_divisor):
        step.weight_of = None


def in_evaluation(state: State, loss: Loss, label: str) -> Weight:
    """As `in_training`, but weight by samples, with a warning, if the weight cannot be determined."""
    if own_loss(state.outputs) is not loss.value or (loss.reduction or state.loss_reduction) in WHOLE:
        return _divided(state, count(state, state.batch).samples) or by_samples
    weight = of_own_loss(state.outputs, state.batch, state.model)
    if weight is None and state.loss_reduction is None:
        warn(
            f"{type(state.model).__name__} computes its loss itself, and it is not certain what that is a mean over: "
            f"{label}/loss is the mean over batches, weighted by their samples. If that is right, pass "
            "«loss_reduction='mean'»; for another weight, «loss=» a function that returns (mean, weight)."
        )
    return by_samples if weight is None else weight


def tried(state: State, samples: int, divided: bool = False) -> Literal["mean", "sum", "neither", "nothing"] | None:
    """Whether the loss of several samples is the mean or the sum of their losses, or neither; None if that cannot be tried.

    With ``divided``, whether it is their mean with the weights ``state.step.divisor``, which add up to that of all.

    A single sample is tried twice in one batch. Only losses are computed, without gradients, and the task is restored.
    A loss function of `hocket.Task.train_batch` includes its forward pass.
    """
    function = state.step.loss_function
    several = list(range(min(samples, 8))) if samples > 1 else [0, 0]
    step, composed, divisor = state.step, state.step.composed, state.step.divisor
    try:
        from hocket.training.trial import on_trial

        with torch.no_grad(), on_trial(state):

            def loss_of(indices: list[int]) -> Loss:
                batch = batches.take_samples(state.batch, indices, samples)
                if function is not None:
                    carry = (batches.take_samples(each, indices, samples) for each in state.step.carry)
                    loss = weighed(state, function, batch, *carry)[0]
                else:
                    outputs = batches.take_samples(state.outputs, indices, samples)
                    loss = weighed(state, state.task.loss, outputs, batch)[0]
                return loss._replace(weight=step.divisor) if divided else loss

            value, total = loss_of(several)[:2]
            together = float(value)
            each = {index: loss_of([index]) for index in dict.fromkeys(several)}
            counts = [1.0 if (weight := each[index].weight) is None else float(weight) for index in several]
            losses = [float(each[index].value) if count else 0.0 for index, count in zip(several, counts, strict=True)]
            if not any(counts):
                return "nothing"
            if divided and (total is None or not math.isclose(float(total), sum(counts), rel_tol=1e-6)):
                return None
            average = sum(map(math.prod, zip(losses, counts, strict=True))) / sum(counts)
            size = max(map(abs, (together, *losses)))
            allowed = max(1e-4, 4 * torch.finfo(value.dtype).eps) * size
            if not math.isfinite(together):
                return None
            if size < 1e-6 or abs(together - average) <= allowed:
                return "mean"
            if abs(together - sum(losses)) <= allowed * len(losses):
                return "sum"
            # If the loss differs when computed again, it draws random numbers.
            return "neither" if float(loss_of(several).value) == together else None
    except Exception:  # outputs or losses that cannot be split into samples
        return None
    finally:
        step.composed, step.divisor = composed, divisor


def check_weight(state: State) -> None:
    """Raise ValueError if the weight beside the loss is a second loss: it has a gradient, which evaluation does not compute."""

    def attached(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    try:
        from hocket.training.trial import on_trial

        with torch.enable_grad(), on_trial(state):
            returned = state.task.loss(nesting.map_tensors(attached, state.outputs), state.batch)
    except Exception:  # of a loss that cannot be computed in this way
        return
    as_loss(returned)


@dataclasses.dataclass(frozen=True)
class CountedLabels:
    """The number of labels in a batch that a loss is a mean over: those under ``key`` other than -100.

    ``shifted``: without the first of each row, as in causal language models, which predict label i + 1 at position i.
    """

    key: Any
    shifted: bool = False

    def __call__(self, batch: Batch) -> Tensor:
        """Return the number as a scalar tensor."""
        return (self.of(batch) != -100).sum()

    def of(self, batch: Batch) -> Tensor:
        """Return the labels that may count: ``(B, L)``, or ``(B, L - 1)`` if shifted."""
        labels: Tensor = batch[self.key]
        return labels[:, 1:] if self.shifted else labels


def of_own_loss(outputs: Any, batch: Batch, model: nn.Module) -> Weight | None:
    """Return how to weight the model's own loss: by the labels that count, if its value is their mean; None otherwise.

    Models of transformers compute the cross-entropy over the labels other than -100, shifted by one for causal language
    models. Their classes need not be known: the loss is computed once more and compared. `nothing` if no label counts.
    """
    value = own_loss(outputs)
    # The loss of weights in 16 bits may be rounded to them, and then converted.
    dtypes = {value.dtype, *(each.dtype for each in islice(model.parameters(), 1) if each.is_floating_point())}
    tolerance = max(1e-5, *(2 * torch.finfo(dtype).eps for dtype in dtypes))
    found: dict[Any, list[tuple[str, Weight]]] = {}
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        for key, labels in _labels(batch):
            for name, weight, expected in _readings(key, labels, outputs):
                if (value.isnan() or not value) and (counted := weight(batch)) is not None and not counted:
                    return nothing
                if torch.isclose(expected.double(), value.detach().double(), rtol=tolerance, atol=0.0):
                    found.setdefault(key, []).append((name, weight))
    if not found:
        return None
    # The inputs may fit as labels too, as in language models without padding, so prefer the usual keys.
    readings = dict(found[next((key for key in _LABELS if key in found), next(iter(found)))])
    if len(readings) == 1:
        return next(iter(readings.values()))
    # An untrained model may give all tokens the same probability, which fits both readings.
    kind = str(getattr(model, "loss_type", None) or type(model).__name__)
    if "CausalLM" in kind or "LMHead" in kind:
        return readings.get("shifted")
    return readings.get("plain") if "For" in kind else None


_LABELS = ("labels", "label", "targets", "target")


def _labels(batch: Batch) -> Iterator[tuple[Any, Tensor]]:
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    for key, value in items:
        if isinstance(value, Tensor) and value.dim():
            yield key, value


def _readings(key: Any, labels: Tensor, outputs: Any) -> Iterator[tuple[str, Weight, Tensor]]:
    """Yield the name, weight and expected value of each possible loss: means over labels or samples."""
    floating: list[Tensor] = []
    nesting.map_tensors(lambda tensor: floating.append(tensor) if tensor.is_floating_point() else None, outputs)
    for logits in floating:
        logits = logits.detach()
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if labels.is_floating_point():
            if logits.numel() == labels.numel():
                for distance in (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits):
                    yield "samples", by_samples, distance(logits.view_as(labels), labels.to(logits))
        elif logits.shape[:-1] == labels.shape:
            yield "plain", CountedLabels(key), _cross_entropy(logits, labels)
            if labels.dim() > 1:
                yield "shifted", CountedLabels(key, shifted=True), _cross_entropy(logits[:, :-1], labels[:, 1:])
        elif logits.dim() > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(labels.shape):
            yield "plain", CountedLabels(key), _cross_entropy(logits.movedim(1, -1), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.long()
    outside = ((labels < 0) & (labels != -100)) | (labels >= logits.size(-1))
    if outside.any():  # other integers, not labels
        return torch.tensor(math.nan)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100).cpu()
