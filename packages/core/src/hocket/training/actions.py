"""The default implementation of each action of a step. Plug-ins override them by :mod:`hocket.hookspecs.actions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hocket import elsewhere
from hocket.data import nesting
from hocket.data.batches import unpadded
from hocket.data.nesting import map_tensors
from hocket.data.reading import how_divided
from hocket.data.windows import Window
from hocket.distributed.dtensors import mesh_of
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.losses import WHOLE, Apart, Loss, as_loss
from hocket.optim.clipping import clip_gradients
from hocket.optim.closures import closure_for
from hocket.state import State
from hocket.training import weights
from hocket.training.carry import check_kept, split_carry
from hocket.training.divisors import Divisors, check_added, weighed
from hocket.training.means import Part, Weighting, mean, on_device
from hocket.training.step import CHANGED_IN_PLACE, count, count_part
from hocket.training.whole_batch import check_part

if TYPE_CHECKING:
    from hocket.training.guard import NonFiniteGuard
    from hocket.types import Batch


class OutputObserver(Protocol):
    """An object that is updated with every microbatch, such as the metrics."""

    def update(self, outputs: Any, batch: Batch) -> None:
        """Process a microbatch on its device, and the outputs for it."""


class DefaultActions:
    """Each action in plain PyTorch. See the hooks in :mod:`hocket.hookspecs.actions`."""

    #: Computes the first loss of a fit, with checks, in place of the task; None otherwise. See `hocket.help.first_loss`.
    first_loss: Callable[[object, Batch], Any] | None = None

    def gradients(self, state: State) -> bool:
        """Compute the gradients, in microbatches if the Trainer was given a size."""
        compute_gradients(state)
        return True

    def split_batch(self, state: State, batch: Batch, size: int) -> Sequence[Any]:
        """Call the task's ``split``, which by default returns views along dimension 0; for each batch of a `Window`."""
        if type(batch) is Window:
            return [part for each in batch.batches for part in self.split_batch(state, each, size)]
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
        return state.bus.convert_batch(nesting.move(batch, state.device))

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
                if state.step.divided:
                    return weighed(state, loss_of, outputs, batch, seen=state.step.seen)[0]
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
        elsewhere.module("hocket_checkpoints.resuming", "resume=").resume(state, where)
        return True


def _explain(error: Exception, where: str, task: Any, batch: Batch, outputs: Any = None) -> None:
    """Add a note to an exception of the user's model or loss."""
    from hocket.help import failures  # only needed for error messages

    failures.explain(error, where, task, batch, outputs)


def compute_gradients(
    state: State, split: Callable[[Any], Sequence[Any]] | None = None, observer: OutputObserver | None = None
) -> None:
    """Compute the gradients of the mean loss of the global batch into ``.grad``, and store that loss in ``state.loss``.

    Each microbatch's loss is multiplied by its fraction of the samples. If a loss comes with a weight of its own, the
    accumulated gradients are rescaled by the total weight at the end. The loss of a batch that is not split is not
    multiplied, so the gradients are bitwise identical to those of a plain loop.

    If the strategy does not average gradients, ``.grad`` has those of the mean over this rank's samples, and zeros on a
    rank without samples.

    Args:
        split: a function that returns the microbatches of a batch; None to split by ``state.microbatch``.
        observer: updated with the outputs; None for the metrics of the step.
    """
    bus = state.bus
    factor = accumulate_gradients(state, split, observer)
    for optimizer in state.step_optimizers:
        bus.unscale_gradients(optimizer)
    if factor is not None:
        for parameter in state.trained_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    bus.after_train_batch(state)
    norm = bus.clip_gradients(state)
    state.step.gradient_norm = None if type(norm) is bool else norm


def accumulate_gradients(
    state: State, split: Callable[[Any], Sequence[Any]] | None = None, observer: OutputObserver | None = None
) -> torch.Tensor | None:
    """Do the part of `compute_gradients` up to the last microbatch and the reduction over ranks.

    Returns the factor that the gradients still have to be multiplied by, before they are clipped; None for 1.
    """
    bus, step = state.bus, state.step
    mine, everyone, metrics = step.samples, step.trained_on, observer or step.metrics
    bus.before_train_batch(state)
    bus.zero_grad(state)
    full_batch, world = step.batch, state.strategy.world_size
    world = 1 if world == 1 else state.strategy.data_ranks
    step.kept = []
    if step.boundary is not None:
        step.boundary.begin()
    # Strategies average gradients over the ranks with different data, so the sum over them is `world` times the mean.
    weighting = Weighting(everyone, world) if state.strategy.averages_gradients else Weighting(max(mine, 1))
    if split is not None:
        microbatches = split(full_batch)
    else:
        microbatches = (
            [full_batch] if state.microbatch is None else bus.split_batch(state, full_batch, state.microbatch)
        )
    factor = None
    step.divided = len(microbatches) > 1 or world > 1
    if step.divided and step.tried:
        weights.try_again(step)
    if not step.divided:
        with bus.accumulate(state.prepared, True):
            step.losses = compute_microbatch(state, microbatches[0], mine, None, metrics)[3]
    else:
        parts: list[Part] = []
        gradients: dict[int, torch.Tensor] = {}
        remaining, carry = mine, step.carry
        carries = split_carry(state, microbatches, split)
        how = how_divided(full_batch.batches[0] if type(full_batch) is Window else full_batch)
        for number, (microbatch, carried) in enumerate(zip(microbatches, carries, strict=True), 1):
            microbatch, counts = unpadded(microbatch)
            samples = (
                0 if not counts else mine if microbatch is full_batch else min(mine, count_part(state, microbatch, how))
            )
            remaining -= samples
            step.carry = carried
            if parts and state.overwrites:
                from hocket.training.graphs import keep_gradients

                keep_gradients(state.parameters, gradients)
            with bus.accumulate(state.prepared, number == len(microbatches)):
                parts.append(Part(*compute_microbatch(state, microbatch, samples, weighting, metrics)))
        step.carry = carry
        if remaining:
            raise WrongValue(miscounted(state, mine, remaining))
        factor = mean(state, parts, weighting)
    step.batch, step.outputs = full_batch, None
    if step.boundary is not None:
        step.boundary.backward()
        bus.reduce_gradients(state.prepared, state.trained_parameters())
    return factor


def miscounted(state: State, samples: int, remaining: int) -> str:
    """Return the message about a batch whose microbatches do not hold every sample once."""
    return (
        f"A batch of {samples} samples was split into microbatches that count {samples - remaining} together, so "
        f"{'some would be lost' if remaining > 0 else 'some would count twice'}. Check split and count of "
        f"{type(state.task).__name__}: split(batch, size) returns every sample once, and count(batch) counts samples the same "
        "way in the batch and in its microbatches."
    )


def gradients_again(state: State, guard: NonFiniteGuard) -> torch.Tensor:
    """Compute the gradients of the current step again, at the current weights, and return its loss: an optimizer's closure."""
    step = state.step
    step.metrics = None  # they were updated with this batch already
    kept = step.kept
    with state.unlogged():
        state.bus.gradients(state)
    step.kept = kept
    guard.allows(state)
    return step.loss  # type: ignore[return-value]  # set by `gradients`


def compute_microbatch(
    state: State, batch: Batch, samples: int, weighting: Weighting | None, metrics: OutputObserver | None
) -> tuple[Any, ...]:
    """Run forward, loss and backward, and return the fields of a `Part`.

    Args:
        samples: number of samples that count; 0 for a padding microbatch.
        weighting: what the loss counts for; None to leave the loss as it is.
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
) -> tuple[Any, ...]:
    bus, step = state.bus, state.step
    step.batch = bus.move_batch(state, batch)
    bus.before_forward(state)
    apart: Mapping[str, torch.Tensor] | None = None
    seen = step.seen = Divisors() if step.divided else None
    if step.loss_function is None:
        step.outputs = bus.forward(state, step.batch)
        if state.overwrites:
            from hocket.training.graphs import copied

            step.outputs = copied(step.outputs)
        bus.after_forward(state)
        bus.before_loss(state)
        if seen is None:
            loss = bus.loss(state, step.outputs, step.batch)
        else:
            with seen:
                loss = bus.loss(state, step.outputs, step.batch)
    else:
        loss, apart = _call_loss_function(state)
    step.loss, own, parts, reduction, kept = loss
    summed = False
    if weighting is not None:  # otherwise the loss is used as it is
        over = reduction or state.loss_reduction
        summed = over == "sum"
        if over in WHOLE:
            check_part(state, over, samples)
        if own is None and not summed:
            weight_of = step.weight_of
            if weight_of is None:
                weight_of = weights.in_training(state, loss, samples or count(state, step.batch).samples)
                step.weight_of = None if weight_of is weights.nothing else weight_of
            own = weights.weight(state, weight_of)
        elif step.composed and step.weight_of is None and samples and weights.check_composed(state, samples):
            step.weight_of = weights.by_samples
    if seen is None:
        bus.after_loss(state)
    else:
        with seen:
            bus.after_loss(state)
        weight_given = check_added(state, loss, seen)
        own = weight_given if own is loss.weight else own
        step.seen = seen = None  # it holds the outputs
    if metrics is not None and samples and step.loss_function is None:
        metrics.update(step.outputs, step.batch)
    if kept is not None and samples:
        check_kept(state, kept, samples)
        step.kept.append(kept)
    bus.before_backward(state)
    factor: Any = None
    weight: float | torch.Tensor = samples
    if summed:
        weight = 1 if samples else 0
        factor = weight * (state.strategy.data_ranks if state.strategy.averages_gradients else 1)
    elif weighting is not None:
        weight = samples if own is None or not samples else own
        if isinstance(weight, torch.Tensor):
            weight = on_device(weight, step.loss)  # an integer tensor times a Python float would be float32
        factor = weighting.share(weight)
    if factor is not None:
        _gate(step.outputs, weight)
        if step.loss_function is not None and apart is None and _is_zero(weight):
            step.loss, factor = _zero_loss(state, step.loss), 1.0
    step.outputs = None  # the graph holds what gradients need of them; logits are often the largest tensor of a step
    if apart is None:
        bus.backward(state, step.loss if factor is None else step.loss * factor)
    else:
        _backward_apart(state, apart, factor)
    bus.after_backward(state)
    step.loss = step.loss.detach()
    return step.loss, weight, own is not None and not summed, parts, summed, samples


def _call_loss_function(state: State) -> tuple[Loss, Mapping[str, torch.Tensor] | None]:
    """Call the step's loss function for the current microbatch; return the loss, and the losses of `hocket.Apart` or None."""
    step, function = state.step, state.step.loss_function
    assert function is not None
    # After the first microbatch, fsdp may reduce the gradients of the earlier ones within a loss function.
    without = [parameter for parameter in state.parameters if parameter.grad is None] if step.loss is None else ()
    apart: Mapping[str, torch.Tensor] | None = None

    def call(*args: Any) -> Any:
        nonlocal apart
        if step.divided:
            assert step.seen is not None
            with step.seen:
                loss, returned = weighed(state, function, *args, seen=step.seen)
        else:
            loss = as_loss(returned := function(*args))
        if isinstance(returned, Apart):
            apart = returned.losses
        if state.overwrites:
            from hocket.training.graphs import copied

            loss = copied(loss)
        kept = map_tensors(torch.Tensor.detach, loss.kept)
        return loss._replace(kept=kept)

    with state.bus.forward_context():
        arguments = (step.batch, *step.carry)
        deferred = step.boundary is not None
        try:
            loss = state.bus.call_prepared(state.prepared, call, arguments, state.trained_parameters(), deferred)
        except RuntimeError as error:
            if step.boundary is not None and "in-place operation" in str(error):
                error.add_note(CHANGED_IN_PLACE)
            raise
    if [parameter for parameter in without if parameter.grad is not None]:  # twice as fast as a generator in any()
        raise WrongState(
            "The loss function of step(…) computed gradients by backward(), which would be added to those of the loss that it "
            "returned. Return the sum of the losses. For a gradient within the loss, such as a penalty, use "
            "torch.autograd.grad(…, create_graph=True)."
        )
    return loss, apart


def _is_zero(weight: float | torch.Tensor) -> bool:
    """Whether a weight is known to be 0 without waiting for a device."""
    return not weight if not isinstance(weight, torch.Tensor) else weight.device.type == "cpu" and not weight.item()


def _zero_loss(state: State, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that counts nothing and reaches every parameter, in place of a mean over nothing, whose gradient is NaN."""
    trained = [parameter for parameter in state.trained_parameters() if parameter.requires_grad]
    if any(mesh_of(parameter) is not None for parameter in trained):
        return loss * 0
    return torch.stack([parameter.reshape(-1)[:1].sum() * 0 for parameter in trained]).sum().to(loss)


def _backward_apart(state: State, losses: Mapping[str, torch.Tensor], factor: Any) -> None:
    """Backpropagate each loss into the parameters of its own optimizer only."""
    step = state.step
    optimizers = dict(zip(state.optimizer_names, state.optimizers, strict=True))
    if {id(optimizers.get(name)) for name in losses} != set(map(id, state.step_optimizers)):
        raise WrongValue(
            f"The loss function returned hocket.Apart of {', '.join(map(repr, losses))} in a step of the optimizers "
            f"{step.name.replace('+', ', ') or 'named ' + ', '.join(state.optimizer_names)}. Give each of them one loss."
        )
    if step.boundary is not None:
        raise WrongValue(
            "hocket.Apart keeps the losses of one forward pass apart, but the batch has a tensor that was computed "
            "before the step with gradients, where they would meet. Compute that tensor in the loss function, or detach it."
        )
    for number, (name, loss) in enumerate(losses.items(), 1):
        held = [p for group in optimizers[name].param_groups for p in group["params"] if p.requires_grad]
        if any(mesh_of(parameter) is not None for parameter in held):
            raise WrongValue(
                "hocket.Apart needs full parameters on every rank, and this strategy shards them. Use "
                "«strategy='ddp'», or take a step for each loss."
            )
        step.inputs = held
        step.retain_graph = number < len(losses)
        try:
            state.bus.backward(state, loss if factor is None else loss * factor)
        finally:
            step.inputs, step.retain_graph = None, False


def _gate(outputs: Any, weight: float | torch.Tensor) -> None:
    """Zero the gradients of the outputs if the weight is 0.

    A mean over no samples is NaN, and 0 times its gradient is NaN too.
    """
    if not isinstance(weight, torch.Tensor) and weight:
        return

    def gated(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # of outputs that compiled code does not use
            return None
        # Compared on the device, without a sync.
        return (
            torch.where(weight != 0, gradient, 0.0) if isinstance(weight, torch.Tensor) else torch.zeros_like(gradient)
        )

    map_tensors(lambda output: output.requires_grad and output.register_hook(gated), outputs)
