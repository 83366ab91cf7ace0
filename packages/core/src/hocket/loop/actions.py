"""The default implementation of each action of a step. Plug-ins override them by :mod:`hocket.hookspecs.actions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hocket.basics.losses import Loss, as_loss
from hocket.data.batch_placement import move
from hocket.data.batches import Window, unpadded
from hocket.data.reading import how_divided
from hocket.errors import WrongType, WrongValue
from hocket.help import optional_packages
from hocket.loop.inferred_weights import try_again
from hocket.loop.weighing import Kind, Part, Weight, Weighting, mean, stop_gradients_of_nothing, weigh, zero_loss
from hocket.optim.clipping import clip_gradients
from hocket.optim.closures import closure_for
from hocket.state.loss_divisors import LossWatch
from hocket.state.state import State
from hocket.state.step import UserStep, count_part, miscounted

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.hookspecs.bus import Hooks
    from hocket.loop.nonfinite import NonFiniteGuard


class OutputObserver(Protocol):
    """An object that is updated with every microbatch, such as the metrics."""

    def update(self, outputs: Any, batch: Batch) -> None:
        """Process a microbatch on its device, and the outputs for it."""


class DefaultActions:
    """Each action in plain PyTorch. See the hooks in :mod:`hocket.hookspecs.actions`."""

    #: Computes the first loss of a fit, with checks, in place of the task; None otherwise. See `hocket_insight.first_loss`.
    first_loss: Callable[[object, Batch], Any] | None = None

    def gradients(self, state: State) -> bool:
        """Compute the gradients, in microbatches if the Trainer was given a size."""
        compute_gradients(state)
        return True

    def split_batch(self, state: State, batch: Batch, size: int) -> Sequence[Any]:
        """Call the task's ``split``, which by default returns views along dimension 0; for each batch of a `Window`."""
        if type(batch) is Window:
            return [part for inner in batch.batches for part in self.split_batch(state, inner, size)]
        microbatches = state.task.split(batch, size)
        if type(microbatches) is list:
            return microbatches
        if isinstance(microbatches, torch.Tensor | Mapping | str) or not isinstance(microbatches, Iterable):
            raise WrongType(
                f"split(batch, size) of {type(state.task).__name__} returned {type(microbatches).__name__}. It returns a list "
                "of batches of at most size samples each."
            )
        return list(microbatches)

    def move_batch(self, state: State, batch: Batch) -> Any:
        """Move the batch to the device, then have the precision convert it."""
        return state.bus.convert_batch(move(batch, state.device))

    def forward(self, state: State, batch: Batch) -> Any:
        """Call the prepared model in the precision's context."""
        try:
            with state.bus.forward_context():
                if state.step.optimizers is None:
                    return state.prepared(batch)
                deferred = state.step.boundary is not None
                return state.bus.call_prepared(
                    state.prepared, state.task, (batch,), state.trained_parameters(), deferred
                )
        except Exception as error:
            _explain(error, "forward", state.task, batch)
            raise

    def loss(self, state: State, outputs: Any, batch: Batch) -> Loss:
        """Compute the task's loss in the precision's context."""
        with state.bus.forward_context():
            try:
                loss_of = state.task.loss if self.first_loss is None else self.first_loss
                if (watch := state.step.watch) is not None:
                    return watch.weighed(state.loss_reduction, loss_of, outputs, batch)
                returned = loss_of(outputs, batch)
            except Exception as error:
                _explain(error, "loss", state.task, batch, outputs)
                raise
            return as_loss(returned)

    def backward(self, state: State, loss: torch.Tensor) -> bool:
        """Backpropagate the loss, scaled by the precision."""
        step = state.step
        try:
            if step.inputs is None:
                state.bus.scale_loss(loss).backward()
            else:
                state.bus.scale_loss(loss).backward(inputs=step.inputs, retain_graph=step.retain_graph)
        except RuntimeError as error:
            if loss.requires_grad:
                _explain(error, "backward", state.task, step.batch)
                raise
            raise WrongValue(
                "The loss has no gradient. Return the tensor that was computed from the model's outputs, without .detach(), "
                ".item(), torch.no_grad() or argmax on the way, and check that the model has parameters to train "
                "(requires_grad)."
            ) from None
        return True

    def clip_gradients(self, state: State) -> torch.Tensor | bool:
        """Clip as configured by the Trainer's ``clip_gradients``, over all parameters of the step's optimizers."""
        if state.clipping is None:
            return True
        kind, threshold = state.clipping
        norm = clip_gradients(state.trained_parameters(), kind, threshold)
        return True if norm is None else norm

    def optimizer_step(self, state: State, closure: Callable[[], torch.Tensor]) -> bool:
        """Have the precision step every optimizer of the step."""
        taken = False
        for optimizer in state.step_optimizers:
            taken |= state.bus.step_optimizer(optimizer, closure_for(optimizer, lambda: state.loss, closure))
        return taken

    def zero_grad(self, state: State) -> bool:
        """Set all gradients to None, those of parameters without an optimizer too."""
        for parameter in state.parameters:
            parameter.grad = None
        return True

    def schedule_step(self, state: State) -> bool:
        """Step every learning-rate schedule of the Trainer."""
        for schedule in state.schedules:
            schedule.step(state)
        return True

    def eval_forward(self, state: State, batch: Batch) -> Any:
        """Call the task's ``eval_forward`` in the precision's context."""
        try:
            with state.bus.forward_context():
                return state.task.eval_forward(batch)
        except Exception as error:
            _explain(error, "forward", state.task, batch)
            raise

    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Batch) -> bool:
        """Call the task's ``update_metric``, which chooses the metric's inputs."""
        state.task.update_metric(metric, outputs, batch)
        return True

    def resume(self, state: State, where: str | Path) -> bool:
        """Load the checkpoint; the run itself is a new one."""
        optional_packages.module("hocket_checkpoints.resuming", "resume=").resume(state, where)
        return True


def _explain(error: Exception, where: str, task: Any, batch: Batch, outputs: Any = None) -> None:
    """Add a note to an exception of the user's model or loss."""
    from hocket.help import failures  # only needed for error messages

    failures.explain(error, where, task, batch, outputs)


def compute_gradients(
    state: State, split: Callable[[Any], Sequence[Any]] | None = None, observer: OutputObserver | None = None
) -> None:
    """Compute the gradients of the mean loss of the global batch into ``.grad``, and store that loss in ``state.loss``.

    How losses are weighed says `hocket.loop.weighing`. If the strategy does not average gradients, ``.grad`` has those of the
    mean over this rank's samples, and zeros on a rank without samples.

    Args:
        split: a function that returns the microbatches of a batch; None to split by ``state.microbatch``.
        observer: updated with the outputs; None for the metrics of the step.
    """
    finish_gradients(state, accumulate_gradients(state, split, observer))


def finish_gradients(
    state: State, factor: torch.Tensor | None = None, hooks: Hooks | None = None, *, clip: bool = True
) -> None:
    """Do what follows the last backward of a step, whoever computed the gradients: unscale, call after_train_batch, clip.

    Args:
        factor: what to multiply the gradients by; see `accumulate_gradients`. None for 1.
        hooks: the hooks to call, if they are not those of the bus.
        clip: False if the gradients are clipped later: by an engine in its step, or by the user.
    """
    for optimizer in state.step_optimizers:
        state.bus.unscale_gradients(optimizer)
    if factor is not None:
        for parameter in state.trained_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    (hooks or state.bus).after_train_batch(state)
    if clip:
        clip_and_note(state, hooks)
    else:
        state.step.gradient_norm = None


def clip_and_note(state: State, hooks: Hooks | None = None) -> None:
    """Clip the gradients, and set ``state.gradient_norm`` to their norm before that, or None if it was not computed."""
    norm = (hooks or state.bus).clip_gradients(state)
    state.step.gradient_norm = None if type(norm) is bool else norm


def accumulate_gradients(
    state: State, split: Callable[[Any], Sequence[Any]] | None = None, observer: OutputObserver | None = None
) -> torch.Tensor | None:
    """Do the part of `compute_gradients` up to the last microbatch and the reduction over ranks.

    Returns the factor that the gradients still have to be multiplied by, before they are clipped; None for 1.
    """
    bus, step = state.bus, state.step
    metrics = observer or step.metrics
    bus.before_train_batch(state)
    bus.zero_grad(state)
    full_batch, ranks = step.batch, state.strategy.data_ranks
    if isinstance(step, UserStep):
        step.kept = []
        if step.boundary is not None:
            step.boundary.begin()
    if split is not None:
        microbatches = split(full_batch)
    elif state.microbatch is None:
        microbatches = [full_batch]
    else:
        microbatches = bus.split_batch(state, full_batch, state.microbatch)
    correction = None
    if len(microbatches) < 2 and ranks == 1:
        with bus.accumulate(state.prepared, True):
            compute_microbatch(state, microbatches[0], step.samples, None, metrics)
    else:
        # Strategies average gradients over the ranks with different data, so the sum over them is `ranks` times the mean.
        averages = state.strategy.averages_gradients
        weighting = Weighting(step.trained_on, ranks) if averages else Weighting(max(step.samples, 1))
        correction = mean(state, _compute_parts(state, microbatches, split, weighting, metrics), weighting)
    step.batch, step.outputs = full_batch, None
    if step.boundary is not None:
        step.boundary.backward()
        bus.reduce_gradients(state.prepared, state.trained_parameters())
    return correction


def _compute_parts(
    state: State,
    microbatches: Sequence[Batch],
    split: Callable[[Any], Sequence[Any]] | None,
    weighting: Weighting,
    metrics: OutputObserver | None,
) -> list[Part]:
    """Compute the microbatches of a batch that is divided, into microbatches or over ranks. Return their weighed losses."""
    bus, step = state.bus, state.step
    full_batch, samples_of_batch = step.batch, step.samples
    if step.weighing.batches:
        try_again(step.weighing)
    parts: list[Part] = []
    gradients: dict[int, torch.Tensor] = {}
    remaining, carry = samples_of_batch, step.carry
    carries: Sequence[tuple[Any, ...]] = [()] * len(microbatches)
    if carry:
        from hocket.loop.carry import split_carry

        carries = split_carry(state, microbatches, split)
    how = how_divided(full_batch.batches[0] if type(full_batch) is Window else full_batch)
    for number, (microbatch, carried) in enumerate(zip(microbatches, carries, strict=True), 1):
        microbatch, is_real = unpadded(microbatch)
        if not is_real:
            samples = 0
        elif microbatch is full_batch:
            samples = samples_of_batch
        else:  # a rank whose batch is padding has 0 in all of it
            samples = min(samples_of_batch, count_part(state, microbatch, how))
        remaining -= samples
        if isinstance(step, UserStep):
            step.carry = carried
        if parts and state.overwrites:
            from hocket.loop.graphs import keep_gradients

            keep_gradients(state.parameters, gradients)
        with bus.accumulate(state.prepared, number == len(microbatches)):
            part = compute_microbatch(state, microbatch, samples, weighting, metrics)
        assert part is not None
        parts.append(part)
    if isinstance(step, UserStep):
        step.carry = carry
    if remaining:
        raise WrongValue(miscounted(state, samples_of_batch, remaining))
    return parts


def gradients_again(state: State, guard: NonFiniteGuard) -> torch.Tensor:
    """Compute the gradients of the current step again, at the current weights, and return its loss: an optimizer's closure."""
    step = state.step
    step.metrics = None  # they were updated with this batch already
    kept = step.kept if isinstance(step, UserStep) else None
    with state.unlogged():
        state.bus.gradients(state)
    if isinstance(step, UserStep) and kept is not None:
        step.kept = kept
    guard.allows(state)
    return step.loss  # type: ignore[return-value]  # set by `gradients`


def compute_microbatch(
    state: State, batch: Batch, samples: int, weighting: Weighting | None, metrics: OutputObserver | None
) -> Part | None:
    """Run forward, loss and backward. Return the loss with its weight; None if the batch is not divided.

    Args:
        samples: number of samples that count; 0 for a padding microbatch.
        weighting: what to multiply the loss by; None for a batch that is not divided, whose loss is used as it is.
        metrics: updated with the outputs, unless None.
    """
    others, logged = state.step.others, state.aggregates
    for parameter in others:
        parameter.requires_grad_(False)
    outer, logged.samples = logged.samples, samples
    try:
        return _compute_microbatch(state, batch, samples, weighting, metrics)
    finally:
        logged.samples = outer
        for parameter in others:
            parameter.requires_grad_(True)


def _compute_microbatch(
    state: State, batch: Batch, samples: int, weighting: Weighting | None, metrics: OutputObserver | None
) -> Part | None:
    bus, step = state.bus, state.step
    step.batch = bus.move_batch(state, batch)
    bus.before_forward(state)
    step.watch = None if weighting is None else LossWatch()
    if step.loss_function is None:
        loss = _forward_and_loss(state)
    else:
        from hocket.loop.loss_functions import call_loss_function

        loss = call_loss_function(state)
    step.loss = loss.value
    weight = None
    if step.watch is None:
        bus.after_loss(state)
    else:
        weight = _weigh_with_additions(state, loss, samples, step.watch)
        step.watch = None  # it holds the outputs
    if metrics is not None and samples and step.loss_function is None:
        metrics.update(step.outputs, step.batch)
    if loss.kept is not None and samples and isinstance(step, UserStep):
        from hocket.loop.carry import check_kept

        check_kept(state, loss.kept, samples)
        step.kept.append(loss.kept)
    bus.before_backward(state)
    factor = None
    if weight is not None and weighting is not None:
        weight = weight.on_device(step.loss)
        factor = weighting.factor(weight)
        stop_gradients_of_nothing(step.outputs, weight)
        if step.loss_function is not None and step.losses_apart is None and weight.is_known_zero:
            step.loss, factor = zero_loss(state, step.loss), 1.0
    step.outputs = None  # the graph holds what gradients need of them; logits are often the largest tensor of a step
    if step.losses_apart is None:
        bus.backward(state, step.loss if factor is None else step.loss * factor)
    else:
        from hocket.loop.loss_functions import backward_apart

        backward_apart(state, step.losses_apart, factor)
    bus.after_backward(state)
    step.loss = step.loss.detach()
    if weight is not None:
        return Part(step.loss, weight, loss.parts, samples)
    step.losses = loss.parts
    return None


def _forward_and_loss(state: State) -> Loss:
    """Compute the outputs and the loss of the current microbatch, with their events."""
    bus, step = state.bus, state.step
    step.outputs = bus.forward(state, step.batch)
    if state.overwrites:
        from hocket.loop.graphs import copied

        step.outputs = copied(step.outputs)
    bus.after_forward(state)
    bus.before_loss(state)
    if step.watch is None:
        return bus.loss(state, step.outputs, step.batch)
    with step.watch:
        return bus.loss(state, step.outputs, step.batch)


def _weigh_with_additions(state: State, loss: Loss, samples: int, watch: LossWatch) -> Weight:
    """Return what a loss counts for, and let plug-ins change it; by samples, if they add a mean over another number."""
    step = state.step
    weight = weigh(state, loss, samples)
    with watch:
        state.bus.after_loss(state)
    covered = watch.covers_additions(state.loss_reduction, loss, step.loss, step.weighing)
    return weight if covered or loss.weight is None else Weight(Kind.SAMPLES, samples)
