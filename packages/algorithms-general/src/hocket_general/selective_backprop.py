"""Selective backpropagation: train on the samples of a batch that have a large loss."""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.basics import seeding
from hocket.basics.losses import as_loss, own_loss
from hocket.data.batch_placement import move
from hocket.data.batches import split, take_samples, unpadded
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.loop.modes import eval_mode
from hocket.state.batch_part import BatchPart
from hocket.state.span import Span
from hocket.state.step import count
from hocket.state.task import SupervisedTask, Task

if TYPE_CHECKING:
    from hocket.basics.time import Time
    from hocket.state.state import State


def should_select(
    elapsed: float, batch_in_epoch: int, start: float = 0.5, stop: float = 0.9, interrupt: int = 2
) -> bool:
    """Whether to select samples in a batch: within ``[start, stop)`` of the run, except in every ``interrupt``-th batch.

    Args:
        elapsed: the completed fraction of the run, in [0, 1].
        batch_in_epoch: the number of the batch in its epoch, from 0.
        start, stop: fractions of the run.
        interrupt: train on the full batch in every so many batches of an epoch; 0 for none.

    Example:
        >>> from hocket_general.functional import should_select
        >>> [should_select(0.5, batch) for batch in range(4)]
        [True, False, True, False]
    """
    return start <= elapsed < stop and _selects(batch_in_epoch, interrupt)


def _selects(batch_in_epoch: int, interrupt: int) -> bool:
    return interrupt == 0 or (batch_in_epoch + 1) % interrupt != 0


def select_using_loss(losses: Tensor, keep: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Choose ``int(keep * N)`` of N samples without replacement, those with a large loss more often.

    The sample with the i-th smallest loss is at the percentile ``p_i = (i + 0.5) / N`` and is drawn with a probability
    proportional to ``p_i ** (1 / keep - 1)``: the ``beta`` of Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the
    Biggest Losers", equation 1 (arXiv 1910.00762), for which a fraction of ``keep`` is expected to be selected.

    Random numbers are drawn on the CPU and do not depend on the losses, so nothing waits for the device.

    Args:
        losses: one loss per sample, ``(N,)``, on any device. NaN counts as the smallest.
        keep: the fraction to keep, in (0, 1]; at least one sample is kept.
        generator: a generator on the CPU; torch's default generator if None.

    Returns:
        Ascending int64 indices on the device of ``losses``.

    Raises:
        ValueError: ``keep`` is not in (0, 1], or ``losses`` is not a vector of at least one loss.

    Example:
        >>> import torch
        >>> from hocket_general.functional import select_using_loss
        >>> losses = torch.tensor([0.1, 5.0, 0.2, 4.0])
        >>> select_using_loss(losses, keep=0.5, generator=torch.Generator().manual_seed(0))
        tensor([1, 3])
    """
    _check_keep("select_using_loss", keep)
    if losses.dim() != 1 or not losses.numel():
        raise WrongValue(
            f"select_using_loss was given losses of shape {tuple(losses.shape)}: give one loss per sample, of shape (N,), such "
            "as cross_entropy(outputs, targets, reduction='none')."
        )
    draws = torch.empty(losses.numel(), dtype=torch.float64).exponential_(generator=generator)
    places = _places(draws, keep).to(losses.device, non_blocking=losses.device.type != "mps")  # pytorch#139550
    smallest_first = losses.detach().nan_to_num(nan=float("-inf"), posinf=float("inf")).argsort(stable=True)
    return smallest_first[places].sort().values


def _places(draws: Tensor, keep: float) -> Tensor:
    """Return which of the samples in ascending order of loss to keep, from a draw of Exp(1) for each.

    Sorting ``draw / weight`` draws without replacement (Efraimidis and Spirakis 2006); in logarithms, small weights do not
    underflow.
    """
    samples = draws.numel()
    percentiles = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
    race = draws.log() - (1 / keep - 1) * percentiles.log()
    return race.argsort()[: max(1, int(keep * samples + 1e-9))]


def _check_keep(who: str, keep: float) -> None:
    if not 0 < keep <= 1:
        raise WrongValue(f"{who} was given «keep={keep}»: give the fraction of samples to keep, such as 0.5.")


class SelectiveBackprop(Algorithm):
    """Train on the ``keep`` of each batch's samples that have the largest losses, mostly.

    Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers" (arXiv 1910.00762), in the variant of
    MosaicML Composer: percentiles are those within the batch, and a fixed number of samples is drawn by
    :func:`select_using_loss`.

    It selects before any augmentation. The batch is scored by a forward pass in eval mode, without gradients, which changes
    neither batch-norm statistics nor the random numbers of training. Each rank selects from its own samples.

    Args:
        start: when selection begins: a fraction of the duration such as ``"0.5dur"``, or a time.
        stop: when it ends.
        keep: the fraction of the samples to keep, in (0, 1].
        interrupt: train on the full batch in every so many batches of an epoch; 0 for none.
        scale_factor: score images (or volumes, or sequences of features) scaled to this fraction of their size, in (0, 1].
        input_key: where in the batch the inputs are, for ``scale_factor``: an index, a key or an attribute; None for the
            Trainer's ``inputs``, or index 0.

    Raises:
        ValueError: an argument out of range; later, a loss that has no value for each sample.
        TimeError: invalid ``start`` or ``stop``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 3), loss="cross_entropy", optimizer="sgd(lr=0.1)", duration="4ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randint(3, (8,)))] * 10,
        ...     algorithms=[hocket_general.SelectiveBackprop(start="0.25dur", keep=0.5)],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.AFTER_DATALOADER}
    phase = Phase.SELECT

    def __init__(
        self,
        start: str | Time | None = "0.5dur",
        stop: str | Time | None = "0.9dur",
        keep: float = 0.5,
        interrupt: int = 2,
        scale_factor: float = 1.0,
        input_key: Any = None,
    ) -> None:
        _check_keep("SelectiveBackprop", keep)
        if interrupt < 0 or interrupt == 1:
            raise WrongValue(
                f"SelectiveBackprop was given «interrupt={interrupt}»: give 0 to select in every batch, or 2 or more to train "
                "on the full batch in every so many."
            )
        if not 0 < scale_factor <= 1:
            raise WrongValue(
                f"SelectiveBackprop was given «scale_factor={scale_factor}»: give a fraction such as 0.5, or 1."
            )
        self._span = Span(start, stop)
        self.keep = keep
        self.interrupt = interrupt
        self.scale_factor = scale_factor
        self._inputs = BatchPart("selective-backprop", "input", input_key)

    def match(self, event: Event, state: State) -> bool:
        """Whether to select samples in the current batch."""
        return self._span.includes(state) and _selects(state.timestamp.batch_in_epoch, self.interrupt)

    def no_effect(self, state: State) -> str:
        """Return that ``interrupt`` leaves out every batch, or ``keep`` none of its samples, if so."""
        if self.keep == 1:
            return "«keep=1» selects all samples. Give a smaller fraction, such as 0.5."
        batches, length = self._span.batches(state), state.epoch_length or state.timestamp.batch
        if batches is None or any(_selects(batch % length, self.interrupt) for batch in batches[:3]):
            return ""
        return f"«interrupt={self.interrupt}» skips all {len(batches)} batches from start to stop. Give a longer span."

    def apply(self, event: Event, state: State) -> None:
        """Replace the batch by its selected samples."""
        samples = count(state, state.batch).samples
        state.batch = move(state.batch, state.device)
        indices = select_using_loss(
            self._losses(state, samples), self.keep, generator=state.generator(self, per_rank=True)
        )
        task = state.task
        if type(task).split is Task.split:
            state.batch = take_samples(state.batch, indices, samples)
        else:
            each = task.split(state.batch, 1)
            state.batch = task.join([each[index] for index in indices.tolist()])

    def _losses(self, state: State, samples: int) -> Tensor:
        """Return the loss of each sample, in eval mode and, if the Trainer was given a size, in microbatches."""
        full = state.batch
        if self.scale_factor < 1:
            state.batch = self._inputs.put(state, self._smaller(self._inputs.of(state)))
        batch, bus, task = state.batch, state.bus, state.task
        state.batch = full
        losses: list[Tensor] = []
        with torch.no_grad(), seeding.preserved(), eval_mode(task), state.unlogged():
            for part in [batch] if state.microbatch is None else bus.split_batch(state, batch, state.microbatch):
                scored, counts = unpadded(part)
                scored = bus.convert_batch(scored)
                if type(task).eval_forward is Task.eval_forward:
                    outputs = bus.eval_forward(state, scored)
                else:
                    with bus.forward_context():
                        outputs = task(scored)
                if counts:
                    with bus.forward_context():
                        losses.append(_per_sample(task, outputs, scored, count(state, scored).samples))
        found = losses[0] if len(losses) == 1 else torch.cat(losses)
        if found.numel() != samples:
            raise WrongValue(
                f"selective-backprop found {found.numel()} losses in a batch of {samples} samples. Check split and count of "
                f"{type(task).__name__}."
            )
        return found

    def _smaller(self, inputs: Any) -> Tensor:
        if not isinstance(inputs, Tensor) or inputs.dim() not in _MODES or inputs.dtype not in _SCALED:
            found = (
                f"{inputs.dtype} of shape {tuple(inputs.shape)}"
                if isinstance(inputs, Tensor)
                else type(inputs).__name__
            )
            raise WrongType(
                f"selective-backprop scales images of shape (N, C, H, W), or (N, C, L) and (N, C, D, H, W), and found {found}. "
                "Give «scale_factor=1», or say where the images are with input_key=."
            )
        values = inputs if inputs.is_floating_point() else inputs.float()
        sizes = [max(1, int(size * self.scale_factor)) for size in inputs.shape[2:]]
        scaled = F.interpolate(values, sizes, mode=_MODES[inputs.dim()], align_corners=False)
        return scaled if inputs.is_floating_point() else scaled.round().to(inputs.dtype)


#: Interpolation by number of dimensions, and the dtypes that it takes.
_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}
_SCALED = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _per_sample(task: Task, outputs: Any, batch: Any, samples: int) -> Tensor:
    """Return the loss of each sample, ``(samples,)``: by ``reduction="none"``, or else the task's loss sample by sample."""
    if isinstance(task, SupervisedTask):
        if task.loss_function is None:
            raise WrongValue(
                f"{type(task.network).__name__} computes its loss itself, over the whole batch, and selective-backprop needs "
                "the loss of each sample. Pass a «loss=» that computes it from outputs and targets."
            )
        if (losses := _unreduced(task.loss_function, outputs, task.targets_of(batch), samples)) is not None:
            return losses
    own = own_loss(outputs)
    try:
        parts = list(zip(split(outputs, 1, samples), task.split(batch, 1), strict=True))
    except ValueError as error:
        raise WrongValue(
            f"selective-backprop computes the loss of each sample, and cannot split the model's outputs, or the batch, into "
            f"samples: {error} Use a loss with an argument reduction= that takes 'none', or define split(batch, size) in the "
            "hocket.Task."
        ) from error
    each: list[Tensor] = []
    for output, part in parts:
        value = type(task).loss(task, output, part)  # not the first call's check, which is for batches
        if own is not None and value is own:
            raise WrongValue(
                f"The loss of {type(task).__name__} is one that the model computed over the whole batch, and "
                "selective-backprop needs the loss of each sample. Compute the loss from the outputs in loss(outputs, batch)."
            )
        each.append(as_loss(value).value)
    return torch.stack(each)


def _unreduced(function: Any, outputs: Any, targets: Any, samples: int) -> Tensor | None:
    """Return the losses by ``reduction="none"``, or None for a function that has no such argument or no loss per sample."""
    if isinstance(function, nn.Module):
        if not hasattr(function, "reduction"):
            return None
        changed: Any = copy.copy(function)
        changed.reduction = "none"
    else:
        try:
            if "reduction" not in inspect.signature(function).parameters:
                return None
        except (TypeError, ValueError):
            return None
        changed = functools.partial(function, reduction="none")
    losses = None
    with suppress(ValueError, NotImplementedError):  # a function that takes other reductions only
        losses = changed(outputs, targets)
    if not isinstance(losses, Tensor) or not losses.dim() or losses.shape[0] != samples:
        return None
    if losses.dim() == 1:
        return losses
    losses = losses.flatten(1)
    ignored = _ignored(function, targets, losses)
    if ignored is None:
        return losses.mean(1)
    return losses.sum(1) / (~ignored).sum(1).clamp(min=1)  # a sample without any label has a loss of 0


def _ignored(function: Any, targets: Any, losses: Tensor) -> Tensor | None:
    """Return which positions a classification loss ignores, shaped like the losses, or None if it may ignore none."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.numel() != losses.numel():
        return None
    bound = function.keywords if isinstance(function, functools.partial) else getattr(function, "__dict__", {})
    called = function.func if isinstance(function, functools.partial) else function
    index = bound.get("ignore_index", -100 if called in (F.cross_entropy, F.nll_loss) else None)
    return None if index is None else targets.reshape(losses.shape) == index
