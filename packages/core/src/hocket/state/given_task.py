"""Make a Task of what is given to the Trainer, and explain methods that nothing calls, or that take other arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.basics.short_repr import short
from hocket.errors import WrongType
from hocket.help import optional_packages, warn
from hocket.hookspecs.events import Event
from hocket.state.task import SupervisedTask, Task

if TYPE_CHECKING:
    from hocket.basics.types import Where

#: Methods of a Task whose arguments are checked in advance; exceptions of forward and loss get notes about the batch.
_CALLED = (
    "train_batch", "eval_forward", "metrics", "update_metric", "count", "split", "join", "configure_optimizers",
    "extra_state", "load_extra_state",
)  # fmt: skip
#: Names of outputs.
_OUTPUTS = ("outputs", "output", "out", "preds", "pred", "predictions", "logits", "y_hat", "y_pred")


def task_of(
    model: nn.Module,
    loss: Any,
    inputs: Where = None,
    targets: Where = None,
    outputs: Where = None,
) -> Task:
    """Return a Task as it is, or one made of a module and a loss. Raises TypeError for arguments that a Task does not take."""
    if isinstance(model, Task):
        _check(model, loss, inputs, targets, outputs)
        return model
    if loss is None or any(isinstance(where, list | set) for where in (inputs, targets, outputs)):
        optional_packages.ask("failures.models.check_arguments", model, loss, inputs, targets, outputs)
    return SupervisedTask(model, loss, inputs, targets, outputs)


def _check(task: Task, loss: object, inputs: Where, targets: Where, outputs: Where) -> None:
    """Raise TypeError for a Task that cannot be trained, or given with these arguments. Warn of methods that nothing calls."""
    kind = type(task)
    if kind.loss is Task.loss and not task.owns_steps:
        optional_packages.ask("failures.models.check_foreign", task)
    if text := optional_packages.ask("failures.uncalled.uncalled", kind, Task, [event.value for event in Event]):
        warn(text)
    if inputs is not None or targets is not None or outputs is not None:
        raise WrongType(
            f"{kind.__name__} is a Task: its forward, loss and update_metric select their inputs from a batch and from the "
            "outputs. Omit «inputs=», «targets=» and «outputs=»."
        )
    if loss is not None:
        raise WrongType(f"{kind.__name__} is a Task, which defines its own loss. Omit «loss=».")
    _check_methods(task)


def _check_methods(task: Task) -> None:
    """Raise TypeError for methods of a task that cannot be called with the arguments that hocket gives."""
    for name in ("forward", "loss", *_CALLED):
        declared, method = getattr(Task, name), getattr(task, name)
        if getattr(method, "__func__", None) is not declared:
            _check_method(type(task).__name__, name, declared, method)


def _check_method(kind: str, name: str, declared: Callable[..., object], method: object) -> None:
    first, *arguments = inspect.signature(declared).parameters
    form = f"Define def {name}({', '.join([first, *arguments])})."
    if not callable(method):
        raise WrongType(f"{kind}.{name} is {short(method)}, and has to be a method. {form}")
    if name in _CALLED:
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise WrongType(
                f"{name} of {kind} takes other arguments than ({', '.join(arguments)}): {error}. {form}"
            ) from None
    if arguments[-2:] in (["outputs", "batch"], ["batch", "step"]):
        given = [parameter.lower() for parameter in inspect.signature(method).parameters]
        given = given[len(arguments) - 2 : len(arguments)]
        if len(given) == 2 and (given[0] == arguments[-1] or given[1] in _OUTPUTS):
            raise WrongType(
                f"{name} of {kind} takes ({', '.join(given)}) in another order: it is called with "
                f"({', '.join(arguments)}). {form}"
            )
