"""Evaluate a set, and record what the model says of each sample."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hocket.data import loaders
from hocket.data.adapters import adapt, prepared
from hocket.data.batches import split
from hocket.data.source import empty
from hocket.errors import WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.attachment import Attachment
from hocket.state.batch_part import BatchPart
from hocket.state.known_weights import KnownWeights
from hocket.state.loss_divisors import LossWatch
from hocket.state.simple_metrics import Accuracy
from hocket.state.step import count
from hocket.state.task import SupervisedTask
from hocket_tools.beside import beside, explained
from hocket_tools.judging.ordered import in_order
from hocket_tools.judging.samples import Samples, merged
from hocket_tools.progress import say
from hocket_tools.reproducing import digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hocket.run.trainer import Trainer
    from hocket.state.state import State

Corrupt = Callable[[Tensor, "list[int]"], Tensor]


@explained("The evaluation")
def record(
    trainer: Trainer,
    label: str,
    *,
    checkpoint: str | None = None,
    keep: bool = False,
    losses: bool = True,
    corrupt: Corrupt | None = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Samples, dict[str, float]]:
    """Evaluate one of the Trainer's sets, and return what it says of each sample, and the values of its metrics.

    All ranks call it, and have the samples of all, in the order of the set.

    Args:
        label: of the evaluation set.
        checkpoint: whose weights to evaluate; None for the Trainer's.
        keep: whether outputs and targets are kept, which takes their memory.
        losses: whether the loss of each sample is computed.
        corrupt: a function of images and their places in the set that returns changed images.
        progress: called after each batch.
    """
    state = trainer.state
    with _alone(state, label) as evaluated:
        recorder = _Recorder(evaluated, keep, losses, progress)
        plugins = [Attachment("algorithms", "recorder", recorder)]
        if corrupt is not None:
            plugins.append(Attachment("algorithms", "corruption", _Corruption(corrupt, evaluated.data)))
        state.bus.attach(*plugins)
        try:
            values = trainer.evaluate(checkpoint=checkpoint)
        finally:
            for each in plugins:
                state.bus.detach(each)
    everything = state.bus.all_gather_object((state.strategy.data_rank, recorder.parts))
    if not any(parts for _, parts in everything):
        raise empty(evaluated.data, f"The evaluation set '{label}'", "eval_data", "sample")
    by_rank = dict(reversed(everything))  # of the ranks that saw the same samples, the first
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    return merged([part for group in itertools.zip_longest(*ranks) for part in group if part is not None]), values


@contextmanager
def _alone(state: State, label: str) -> Iterator[Any]:
    """Have the Trainer evaluate this set only, inside, in the order of the data set; yield the set."""
    sets, evaluated = state.eval_sets, copy.copy(state.eval_sets[label])
    evaluated.data = in_order(evaluated.data, f"the loader of '{label}'", state.strategy.rank)
    if evaluated.data is not sets[label].data:
        evaluated.source = adapt(prepared(evaluated.data, state.bus.prepare_data, False), given=evaluated.data)
    state.data.eval_sets = {label: evaluated}
    try:
        with beside(sets[label].source):
            yield evaluated
    finally:
        state.data.eval_sets = sets


class _Recorder(Algorithm):
    """Record outputs, targets and losses after each batch of an evaluation."""

    events = {Event.EVAL_AFTER_FORWARD}
    phase = Phase.WEIGHTS

    def __init__(self, evaluated: Any, keep: bool, losses: bool, progress: Callable[[], None]) -> None:
        self._evaluated = copy.copy(evaluated)  # what it learns of weights from single samples is its own
        vars(self._evaluated).update(_known=KnownWeights(), _samples=None)
        self._keep, self._losses, self._progress = keep, losses, progress
        self.parts: list[Samples] = []

    def apply(self, event: Event, state: State) -> None:
        """Record a batch unless it is padding, or has no samples."""
        samples = 0 if state.aggregates.samples == 0 else count(state, state.batch).samples
        if not samples:
            return
        seen = _Seen()
        with suppress(LookupError, TypeError, WrongValue):  # a task without targets has no metrics
            state.task.update_metric(seen, state.outputs, state.batch)
        part = _read(state, *seen.given) if len(seen.given) == 2 else _nothing()
        part.nonfinite = int(nonfinite(state.outputs, samples).sum())
        known = digests.of_batch(state.batch) if self._losses else ""  # 8 digits of each sample, or 16 of the batch
        part.inputs = [known[at * 8 : at * 8 + 8] if len(known) == samples * 8 else "" for at in range(samples)]
        if self._losses and state.task.has_eval_loss(state.outputs) and state.loss_reduction != "batch":
            part.losses = self._of_each(state, samples)
        if self._keep and len(seen.given) == 2:
            part.outputs, part.raw_targets = (list(each.detach().cpu()) for each in seen.given)
        self.parts.append(part)
        self._progress()

    def _of_each(self, state: State, samples: int) -> Any:
        """Return the loss of each sample, times its weight, and the weight."""
        outputs, batch, step = state.outputs, state.batch, state.step
        try:
            parts = list(zip(split(outputs, 1, samples), state.task.split(batch, 1), strict=True))
        except ValueError:  # outputs of which nobody knows which are of a sample
            return _nothing().losses
        precise = torch.float32 if state.device.type == "mps" else torch.float64
        sums = []
        try:
            for output, part in parts:
                step.outputs, step.batch, step.watch = output, part, LossWatch()
                with step.watch:
                    loss = state.bus.loss(state, output, part)
                sums.append(self._evaluated.weighted(state, state.eval_label, loss, precise))
        finally:
            step.outputs, step.batch, step.watch = outputs, batch, None
        return torch.stack(sums).double().cpu().numpy()


def nonfinite(outputs: Any, samples: int) -> Tensor:
    """Return which samples have NaN or infinity in a tensor of outputs, or in several, with a row for each sample."""
    found = torch.zeros(samples, dtype=torch.bool)
    for each in tree_leaves(outputs):
        if isinstance(each, Tensor) and each.is_floating_point() and each.dim() and len(each) == samples:
            found |= ~each.detach().isfinite().reshape(samples, each.shape[1:].numel()).all(1).cpu()
    return found


def say_nonfinite(number: int, where: Sequence[str], rows: int) -> None:
    """Say how many rows of predictions have NaN or infinity, if any, and where the first are."""
    if number:
        more = " …" if number > len(where) else ""
        shown = f"{number} of {rows} rows: {', '.join(where)}{more}"
        say(f"NaN or infinity in the outputs of {shown}. Look for such inputs, or weights.")


class _Seen:
    """Take what metrics are updated with."""

    given: tuple[Any, ...] = ()

    def update(self, *given: Any) -> None:
        """Keep outputs and targets."""
        self.given = given


def _nothing() -> Samples:
    no_labels = np.zeros(0, np.int64)
    return Samples(np.zeros((0, 2)), no_labels, no_labels, np.zeros((0, 3)))


def _read(state: State, outputs: Any, targets: Any) -> Samples:
    """Return classes, or errors, as far as the shapes of outputs and targets say."""
    part = _nothing()
    if not (
        isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() and len(outputs) == len(targets)
    ):
        return part
    outputs = outputs.detach()
    if targets.is_floating_point() and outputs.shape == targets.shape:
        errors = (outputs.double() - targets.double()).cpu().reshape(len(outputs), -1)
        number = torch.full((len(errors),), float(errors.shape[1]), dtype=errors.dtype)
        part.errors = torch.stack([errors.abs().sum(1), errors.square().sum(1), number], 1).numpy()
    reading = Accuracy()
    if isinstance(state.task, SupervisedTask):
        with suppress(WrongValue):  # a loss of numbers
            reading.follow(state.task.loss_function)
    if outputs.dim() == 2 and outputs.shape[1] == 1 and targets.dim() == 1:
        outputs = outputs.squeeze(1)
    if (
        outputs.shape == targets.shape
        and outputs.dim() == 1
        and (reading.cut is not None or not targets.is_floating_point())
    ):
        part.classes, predicted = 2, (outputs > (reading.cut or 0)).long()
    elif outputs.dim() > 1 and targets.shape == (len(outputs), *outputs.shape[2:]) and not targets.is_floating_point():
        part.classes, predicted = outputs.shape[1], outputs.argmax(1)
    else:
        return part
    labels = targets.long()
    known = (labels != reading.ignored) & (labels >= 0)
    if bool((labels[known] >= part.classes).any()):
        raise WrongValue(
            f"A target is the class {int(labels.max())}, and the outputs have {part.classes} classes, from 0 to "
            f"{part.classes - 1}. Evaluate data with the labels that the model was trained on."
        )
    part.targets, part.predicted = labels.where(known, -1).cpu().numpy(), predicted.cpu().numpy()
    return part


class _Corruption(Algorithm):
    """Replace the images of each batch of an evaluation by corrupted ones."""

    events = {Event.EVAL_BATCH_START}
    phase = Phase.DATA

    def __init__(self, corrupt: Corrupt, data: Any) -> None:
        self._corrupt = corrupt
        self._size = loaders.batch_size(data) if loaders.by_index(data) else None
        self._images = BatchPart("hocket evaluate --corruptions", "input")
        self._batches = 0

    def apply(self, event: Event, state: State) -> None:
        """Corrupt a batch. Places count full batches, so that they do not depend on the number of ranks."""
        images = self._images.of(state)
        self._size = self._size or len(images)
        first = (self._batches * state.strategy.data_ranks + state.strategy.data_rank) * self._size
        self._batches += 1
        state.batch = self._images.put(state, self._corrupt(images, list(range(first, first + len(images)))))
