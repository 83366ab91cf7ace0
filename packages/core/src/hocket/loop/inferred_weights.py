"""Determine, once and if needed, the weight of a loss that does not state it: which `hocket.state.loss_divisors` did not see.

A batch that is not split, on one rank, needs no weights. Several microbatches or ranks do, and so does an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hocket.basics.losses import WHOLE, Loss, as_loss, own_loss
from hocket.data import batches, nesting
from hocket.errors import WrongValue
from hocket.help import names, optional_packages, warn
from hocket.state.known_weights import CountedLabels, KnownWeights, MeanOver
from hocket.state.loss_divisors import LossWatch
from hocket.state.step import UserStep, count
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.state.state import State

_WITH_WEIGHT = (
    "or return it with its weight: «loss=lambda outputs, batch: (outputs.loss, (batch['labels'] != -100).sum())»; "
)
_IN_TASK = "or return (outputs.loss, weight) in the task's loss(outputs, batch), where weight is the number of elements in it; "
_TASK = " For models of transformers there is hocket_nlp.HuggingFaceTask(model)."


def weight(
    state: State, known: KnownWeights, determine: Callable[[], MeanOver | CountedLabels]
) -> float | Tensor | None:
    """Return the weight of the current loss; None for its number of samples, as in `hocket.Loss`.

    Args:
        known: what is known of earlier losses.
        determine: returns what the loss is a mean over; called until a label counts.

    Raises:
        ValueError: the loss was a mean over selected elements in an earlier batch, and is not in this one.
    """
    if known.mean_over is MeanOver.NOTHING:
        known.mean_over = determine()
    over = known.mean_over
    divisor = _divisor(state)
    if over is MeanOver.SAMPLES:
        return None
    if over is MeanOver.DIVISOR and divisor is None:
        raise WrongValue(
            "The loss was a mean over selected elements, such as (loss * mask).sum() / mask.sum(), in an earlier batch, and is "
            "not in this one. Compute it in the same way in every batch, or return (mean, weight), where weight is the number "
            "of its elements."
        )
    if isinstance(over, CountedLabels):
        return over(state.batch)
    return torch.zeros((), dtype=torch.int64) if divisor is None else divisor


def _divisor(state: State) -> float | Tensor | None:
    watch = state.step.watch
    return None if watch is None else watch.divisor


def _over_divisor(state: State, samples: int) -> MeanOver | None:
    """Return DIVISOR if the loss is a mean over as many elements as it is divided by, NOTHING if none count, else None."""
    if _divisor(state) is None or state.loss_reduction is not None:
        return None
    kind = tried(state, samples, True)
    if kind == "mean":  # perhaps only in a batch without padding, if it is added to a mean over samples
        known = state.step.weighing
        known.batches = max(known.batches, 1)
        return MeanOver.DIVISOR
    return MeanOver.NOTHING if kind == "nothing" else None


def in_training(state: State, loss: Loss, samples: int) -> MeanOver | CountedLabels:
    """Return what the losses of microbatches and ranks are means over, determined on the first that is not over nothing.

    Args:
        samples: samples in ``state.batch``; 0 to count them.

    Raises:
        ValueError: the loss is a sum over samples; or the model computes it, and its weight cannot be determined.
    """
    if (loss.reduction or state.loss_reduction) in WHOLE:
        return MeanOver.SAMPLES
    if own_loss(state.outputs) is loss.value:
        over, hint = _of_own_loss(state)
        if over is None and state.loss_reduction == "mean":
            return MeanOver.SAMPLES
        if over is None:
            supervised = type(state.task) is SupervisedTask
            raise WrongValue(
                f"{type(state.model).__name__} computes its loss itself, and it is not certain what that is a mean over, so "
                "microbatches and ranks cannot be given weights. Pass «loss_reduction='mean'» to weight it by samples; "
                + (_WITH_WEIGHT if supervised else _IN_TASK)
                + "or train on one rank without «microbatch=» and «accumulate=»."
                + (_TASK if supervised and names.library(state.model) == "transformers" else "")
                + hint
            )
        return over
    if state.loss_reduction is None:
        samples = samples or count(state, state.batch).samples
        if (over := _over_divisor(state, samples)) is not None:
            return over
        return _by_trial(state, samples)
    return MeanOver.SAMPLES


def in_evaluation(state: State, loss: Loss, label: str) -> MeanOver | CountedLabels:
    """As `in_training`, but weight by samples, with a warning, if the weight cannot be determined."""
    if own_loss(state.outputs) is not loss.value or (loss.reduction or state.loss_reduction) in WHOLE:
        return _over_divisor(state, count(state, state.batch).samples) or MeanOver.SAMPLES
    over, hint = _of_own_loss(state)
    if over is None and state.loss_reduction is None:
        warn(
            f"{type(state.model).__name__} computes its loss itself, and it is not certain what that is a mean over: "
            f"{label}/loss is the mean over batches, weighted by their samples. If that is right, pass "
            f"«loss_reduction='mean'»; for another weight, «loss=» a function that returns (mean, weight).{hint}"
        )
    return over or MeanOver.SAMPLES


def _of_own_loss(state: State) -> tuple[MeanOver | CountedLabels | None, str]:
    """Return what the model's own loss is a mean over, None if that is not certain; and what to install to find it out."""
    try:
        guessing = optional_packages.module("hocket_nlp.own_losses", "Comparing it with the usual losses")
    except optional_packages.NotInstalled as error:
        return None, f" {error}"
    over: MeanOver | CountedLabels | None = guessing.of_own_loss(state.outputs, state.batch, state.model)
    return over, ""


def check_composed(state: State, samples: int) -> None:
    """Try once whether a loss is a mean that has a weight, and is more than a mean over labels; see `LossWatch.composed`."""
    known, watch = state.step.weighing, state.step.watch
    if watch is not None and watch.composed and samples and known.mean_over is MeanOver.NOTHING:
        known.mean_over = MeanOver.SAMPLES if state.loss_reduction is not None else _by_trial(state, samples)


def _by_trial(state: State, samples: int) -> MeanOver:
    """Return NOTHING if no label counts in the batch, else SAMPLES. Raise ValueError for a sum, and warn if it is no mean."""
    kind, watch, known = tried(state, samples), state.step.watch, state.step.weighing
    # A batch without padding does not show that a mean written by hand is over selected elements.
    known.batches = max(known.batches, 1) if kind == "mean" and not (watch and watch.certain) else 0
    if kind == "sum":
        raise WrongValue(
            "The loss of a sample given twice is twice its loss, so this is a sum over samples and not a mean: if a batch "
            "is split into microbatches or divided over ranks, the two differ. If you mean the sum, pass "
            "«loss_reduction='sum'» to the Trainer, or return hocket.Loss(value, reduction='sum'). Else take the mean, "
            "for instance with «reduction='mean'»; «loss_reduction='mean'» uses the loss as it is."
        )
    if kind == "neither":
        warn(
            "The loss of several samples is not the mean of their losses, so a batch that is split into microbatches or "
            "divided over ranks has another loss than the full batch: the mean of the parts, weighted by samples. If the "
            "loss is a mean over something else, such as labels that count, return (mean, weight); if it is over pairs of "
            "the batch, as a contrastive loss, say «loss_reduction='batch'», which refuses to divide batches; if this is "
            "intended, pass «loss_reduction='mean'» to the Trainer."
        )
    return MeanOver.NOTHING if kind == "nothing" else MeanOver.SAMPLES


def try_again(known: KnownWeights) -> None:
    """Have a loss tried again in the 2nd, 4th, 8th, … divided batch, unless it is certain what it is a mean over."""
    known.batches += 1
    if not known.batches & (known.batches - 1) and known.mean_over in (MeanOver.SAMPLES, MeanOver.DIVISOR):
        known.mean_over = MeanOver.NOTHING


def tried(state: State, samples: int, by_divisor: bool = False) -> Literal["mean", "sum", "neither", "nothing"] | None:
    """Whether the loss of several samples is the mean or the sum of their losses, or neither; None if that cannot be tried.

    With ``by_divisor``, whether it is their mean with what they are divided by as weights, which add up to that of all.

    A single sample is tried twice in one batch. Only losses are computed, without gradients, and the task is restored.
    A loss function of `hocket.Task.train_batch` includes its forward pass.
    """
    several = list(range(min(samples, 8))) if samples > 1 else [0, 0]
    step = state.step
    outer = step.watch
    try:
        from hocket.loop.trial import on_trial

        with torch.no_grad(), on_trial(state):

            def loss_of(indices: list[int]) -> Loss:
                batch = batches.take_samples(state.batch, indices, samples)
                step.watch = watch = LossWatch()
                with watch:
                    if isinstance(step, UserStep) and step.loss_function is not None:
                        carry = (batches.take_samples(carried, indices, samples) for carried in step.carry)
                        loss = watch.weighed(state.loss_reduction, step.loss_function, batch, *carry)
                    else:
                        outputs = batches.take_samples(state.outputs, indices, samples)
                        loss = watch.weighed(state.loss_reduction, state.task.loss, outputs, batch)
                return loss._replace(weight=watch.divisor) if by_divisor else loss

            value, total = loss_of(several)[:2]
            together = float(value)
            of_sample = {index: loss_of([index]) for index in dict.fromkeys(several)}
            counts = [1.0 if (stated := of_sample[index].weight) is None else float(stated) for index in several]
            losses = [
                float(of_sample[index].value) if number else 0.0 for index, number in zip(several, counts, strict=True)
            ]
            if not any(counts):
                return "nothing"
            if by_divisor and (total is None or not math.isclose(float(total), sum(counts), rel_tol=1e-6)):
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
        step.watch = outer


def check_weight(state: State) -> None:
    """Raise ValueError if the weight beside the loss is a second loss: it has a gradient, which evaluation does not compute."""

    def attached(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    try:
        from hocket.loop.trial import on_trial

        with torch.enable_grad(), on_trial(state):
            returned = state.task.loss(nesting.map_tensors(attached, state.outputs), state.batch)
    except Exception:  # of a loss that cannot be computed in this way
        return
    as_loss(returned)
