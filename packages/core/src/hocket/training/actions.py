"""The step from top to bottom: what each action does unless a plug-in does it. The hooks: :mod:`hocket.hookspecs.actions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hocket.data import batches
from hocket.data.batches import map_tensors, unpadded
from hocket.distributed.dtensors import mesh_of
from hocket.losses import Apart, Loss, as_loss
from hocket.optim.clipping import clip_gradients
from hocket.state import State
from hocket.training import weights
from hocket.training.means import Part, Weighting, mean, on_device
from hocket.training.step import count


class Shown(Protocol):
    """What is shown a microbatch, as metrics are."""

    def update(self, outputs: Any, batch: Any) -> None:
        """See a microbatch on its device, and the outputs for it."""


class DefaultActions:
    """Plain PyTorch, one line or two for each action. The hooks: :mod:`hocket.hookspecs.actions`."""

    def gradients(self, state: State) -> bool:
        """In microbatches, if the Trainer was given a size."""
        compute_gradients(state)
        return True

    def split_batch(self, state: State, batch: Any, size: int) -> Sequence[Any]:
        """Split by the task; views along dimension 0 unless it says otherwise."""
        pieces = state.task.split(batch, size)
        if type(pieces) is list:
            return pieces
        if isinstance(pieces, torch.Tensor | Mapping | str) or not isinstance(pieces, Iterable):
            raise TypeError(
                f"split(batch, size) of {type(state.task).__name__} returned {type(pieces).__name__}. It returns a list of "
                "batches of at most size samples each."
            )
        return list(pieces)

    def move_batch(self, state: State, batch: Any) -> Any:
        """To the device, then as the precision wants it."""
        return state.bus.convert_batch(batches.move(batch, state.device))

    def forward(self, state: State, batch: Any) -> Any:
        """The prepared model, under the precision's context."""
        with state.bus.forward_context():
            if state.step.optimizers is None:
                return state.prepared(batch)
            return state.bus.call_prepared(state.prepared, state.task, (batch,), state.trained_parameters())

    def loss(self, state: State, outputs: Any, batch: Any) -> Loss:
        """The task's loss, under the precision's context."""
        with state.bus.forward_context():
            return as_loss(state.task.loss(outputs, batch))

    def backward(self, state: State, loss: torch.Tensor) -> bool:
        """Scaled as the precision wants it."""
        step = state.step
        try:
            if step.inputs is None:
                state.bus.scale_loss(loss).backward()
            else:
                state.bus.scale_loss(loss).backward(inputs=step.inputs, retain_graph=step.retain_graph)
        except RuntimeError:
            if loss.requires_grad:
                raise
            raise ValueError(
                "The loss has no gradient. Return the tensor that was computed from the model's outputs, without .detach(), "
                ".item(), torch.no_grad() or argmax on the way, and check that the model has parameters to train "
                "(requires_grad)."
            ) from None
        return True

    def clip_gradients(self, state: State) -> torch.Tensor | bool:
        """As the Trainer's ``clip_gradients`` says; over all parameters that the optimizers of the step hold."""
        if state.clipping is None:
            return True
        kind, threshold = state.clipping
        norm = clip_gradients(state.trained_parameters(), kind, threshold)
        return True if norm is None else norm

    def optimizer_step(self, state: State, closure: Callable[[], torch.Tensor]) -> bool:
        """Every optimizer of the step, by way of the precision."""
        taken = False
        for optimizer in state.step_optimizers:
            taken |= state.bus.step_optimizer(optimizer, closure)
        return taken

    def zero_grad(self, state: State) -> bool:
        """Sets gradients to None; of parameters that no optimizer holds, too."""
        for parameter in state.parameters:
            parameter.grad = None
        return True

    def schedule_step(self, state: State) -> bool:
        """Every schedule of the Trainer."""
        for schedule in state.schedules:
            schedule.step(state)
        return True

    def eval_forward(self, state: State, batch: Any) -> Any:
        """The task's ``eval_forward``, under the precision's context."""
        with state.bus.forward_context():
            return state.task.eval_forward(batch)

    def update_metric(self, state: State, metric: Any, outputs: Any, batch: Any) -> bool:
        """The task says what of a batch a metric sees."""
        state.task.update_metric(metric, outputs, batch)
        return True

    def resume(self, state: State, where: str | Path) -> bool:
        """Load the checkpoint into a run of its own."""
        from hocket.checkpoints import resuming

        resuming.resume(state, where)
        return True


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
    step.kept = []
    if step.boundary is not None:
        step.boundary.begin()
    weighting = Weighting(everyone, world) if state.strategy.averages_gradients else Weighting(max(mine, 1))
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
        left, carry = mine, step.carry
        for number, (piece, carried) in enumerate(zip(pieces, _split_carry(state, pieces, split), strict=True), 1):
            piece, counts = unpadded(piece)
            samples = 0 if not counts else mine if piece is whole else min(mine, count(state, piece).samples)
            left -= samples
            step.carry = carried
            with bus.accumulate(state.prepared, number == len(pieces)):
                parts.append(Part(*compute_microbatch(state, piece, samples, weighting, metrics)))
        step.carry = carry
        if left:
            raise ValueError(_lost(state, mine, left))
        rescale = mean(state, parts, weighting)
    step.batch, step.outputs = whole, None
    if step.boundary is not None:
        step.boundary.backward()

    for optimizer in state.step_optimizers:
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


def _split_carry(
    state: State, pieces: Sequence[Any], split: Callable[[Any], Sequence[Any]] | None
) -> Sequence[tuple[Any, ...]]:
    """What the loss function is given besides each microbatch."""
    carry = state.step.carry
    if not carry or carry[0] is None or len(pieces) == 1:
        return [carry] * len(pieces)
    assert state.microbatch is not None
    of_each = split(carry[0]) if split is not None else state.bus.split_batch(state, carry[0], state.microbatch)
    if len(of_each) != len(pieces):
        raise ValueError(
            f"A batch was split into {len(pieces)} microbatches, and what its step carries into {len(of_each)}. Both hold one "
            "entry for each sample along dimension 0 (a hidden state of shape (layers, samples, features) is carried as "
            f"hidden.transpose(0, 1)); or define split(batch, size) in {type(state.task).__name__} for both."
        )
    return [(unpadded(each)[0],) for each in of_each]


def compute_microbatch(
    state: State, batch: Any, samples: int, weighting: Weighting | None, metrics: Shown | None
) -> tuple[Any, ...]:
    """Forward, loss and backward: what makes a `Part`. Without a ``weighting`` the loss is taken as it is."""
    others = state.step.others
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        return _compute_microbatch(state, batch, samples, weighting, metrics)
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _compute_microbatch(
    state: State, batch: Any, samples: int, weighting: Weighting | None, metrics: Shown | None
) -> tuple[Any, ...]:
    bus, step = state.bus, state.step
    step.batch = bus.move_batch(state, batch)
    bus.before_forward(state)
    apart: Mapping[str, torch.Tensor] | None = None
    if step.loss_function is None:
        step.outputs = bus.forward(state, step.batch)
        bus.after_forward(state)
        bus.before_loss(state)
        loss = bus.loss(state, step.outputs, step.batch)
    else:
        loss, apart = _call_loss_function(state)
    step.loss, own, parts, reduction, kept = loss
    summed = False
    if weighting is not None:
        summed = (reduction or state.loss_reduction) == "sum"
        if own is None and not summed:
            weight_of = step.weight_of
            if weight_of is None:
                weight_of = weights.in_training(state, loss, samples or count(state, step.batch).samples)
                step.weight_of = None if weight_of is weights.nothing else weight_of
            own = weight_of(step.batch)
    bus.after_loss(state)
    if metrics is not None and samples and step.loss_function is None:
        metrics.update(step.outputs, step.batch)
    if kept is not None and samples:
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
            weight = on_device(weight, step.loss)  # a count times a number would be float32
        factor = weighting.share(weight)
    if factor is not None:
        _gate(step.outputs, weight)
    if apart is None:
        bus.backward(state, step.loss if factor is None else step.loss * factor)
    else:
        _backward_apart(state, apart, factor)
    bus.after_backward(state)
    step.loss = step.loss.detach()
    return step.loss, weight, own is not None and not summed, parts, summed


def _call_loss_function(state: State) -> tuple[Loss, Mapping[str, torch.Tensor] | None]:
    """The loss of the current microbatch by the step's own function, and the losses that it keeps apart."""
    step, function = state.step, state.step.loss_function
    assert function is not None
    ends = () if step.boundary is None else step.boundary.tensors
    apart: Mapping[str, torch.Tensor] | None = None

    def call(*args: Any) -> Any:
        nonlocal apart
        returned = function(*args)
        if isinstance(returned, Apart):
            apart = returned.losses
        loss = as_loss(returned)
        kept = map_tensors(torch.Tensor.detach, loss.kept)
        return loss._replace(kept=kept), ends  # graphs that belong to the step, for strategies that look for them

    with state.bus.forward_context():
        arguments = (step.batch, *step.carry)
        loss, _ = state.bus.call_prepared(state.prepared, call, arguments, state.trained_parameters())
    return loss, apart


def _backward_apart(state: State, losses: Mapping[str, torch.Tensor], factor: Any) -> None:
    """Backward of each loss into the parameters of its own optimizer only."""
    step = state.step
    optimizers = dict(zip(state.optimizer_names, state.optimizers, strict=True))
    if {id(optimizers.get(name)) for name in losses} != set(map(id, state.step_optimizers)):
        raise ValueError(
            f"The loss function returned hocket.Apart of {', '.join(map(repr, losses))} in a step of the optimizers "
            f"{step.name.replace('+', ', ') or 'named ' + ', '.join(state.optimizer_names)}. Give each of them one loss."
        )
    for number, (name, loss) in enumerate(losses.items(), 1):
        held = [p for group in optimizers[name].param_groups for p in group["params"] if p.requires_grad]
        if any(mesh_of(parameter) is not None for parameter in held):
            raise ValueError(
                "hocket.Apart needs parameters that are whole on every rank, and this strategy shards them. Use "
                "strategy='ddp', or take a step for each loss."
            )
        step.inputs = [*held, *(() if step.boundary is None else step.boundary.leaves)]
        step.retain_graph = number < len(losses)
        try:
            state.bus.backward(state, loss if factor is None else loss * factor)
        finally:
            step.inputs, step.retain_graph = None, False


def _gate(outputs: Any, weight: float | torch.Tensor) -> None:
    """Let no gradient through to the outputs where the weight is 0.

    A mean over nothing is 0 / 0: multiplied by 0, its gradient is still not a number.
    """
    if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":  # the host does not wait for it
        map_tensors(lambda t: t.requires_grad and t.register_hook(lambda g: torch.where(weight != 0, g, 0.0)), outputs)
    elif not weight:
        map_tensors(lambda t: t.requires_grad and t.register_hook(torch.zeros_like), outputs)
