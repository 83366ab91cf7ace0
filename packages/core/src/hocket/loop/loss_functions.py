"""Loss functions of steps of `hocket.Task.train_batch` and `hocket.Runtime`: call them, and keep their losses apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics.dtensors import mesh_of
from hocket.basics.losses import Apart, Loss, as_loss
from hocket.data.nesting import map_tensors
from hocket.errors import WrongState, WrongValue
from hocket.loop.graphs import copied
from hocket.state.step import CHANGED_IN_PLACE, UserStep

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State


def call_loss_function(state: State) -> Loss:
    """Call the step's loss function for the current microbatch, and set ``state.step.losses_apart``."""
    step = state.step
    assert isinstance(step, UserStep) and step.loss_function is not None
    function = step.loss_function
    # After the first microbatch, fsdp may reduce the gradients of the earlier ones within a loss function.
    without = [parameter for parameter in state.parameters if parameter.grad is None] if step.loss is None else ()

    def noting_apart(*args: Any) -> object:
        returned = function(*args)
        step.losses_apart = returned.losses if isinstance(returned, Apart) else None
        return returned

    def call(*args: Any) -> Loss:
        if step.watch is None:
            loss = as_loss(noting_apart(*args))
        else:
            with step.watch:
                loss = step.watch.weighed(state.loss_reduction, noting_apart, *args)
        if state.overwrites:
            loss = copied(loss)
        return loss._replace(kept=map_tensors(torch.Tensor.detach, loss.kept))

    with state.bus.forward_context():
        arguments = (step.batch, *step.carry)
        deferred = step.boundary is not None
        try:
            loss: Loss = state.bus.call_prepared(state.prepared, call, arguments, state.trained_parameters(), deferred)
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
    return loss


def backward_apart(state: State, losses: Mapping[str, torch.Tensor], factor: float | torch.Tensor | None) -> None:
    """Backpropagate each loss into the parameters of its own optimizer only."""
    step = state.step
    assert isinstance(step, UserStep)
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
    step.losses_apart = None


# --- what loss functions are, and what they must not change


def code_of(function: Any) -> Any:
    """Return the code of a loss function, which is the same in every batch for a method, a lambda and a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def described(function: Any) -> str:
    """Return the name of a loss function, by which ranks compare it."""
    code = code_of(function)
    return f"{code.co_qualname} (line {code.co_firstlineno})" if hasattr(code, "co_qualname") else code.__qualname__


def versions_of(batch: Batch) -> list[int]:
    """Return how often each tensor of a batch was changed in place."""
    versions: list[int] = []
    map_tensors(lambda tensor: versions.append(0 if tensor.is_inference() else tensor._version), batch)
    return versions
