"""The teacher of a distillation: a module, a function that makes one, or weights for a copy of the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.errors import CheckpointError, WrongType, WrongValue
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.state.state import State


def make_teacher(
    given: nn.Module | Callable[[], nn.Module] | str | Path, weights_path: str | Path | None, state: State
) -> nn.Module:
    """Return the teacher with its weights.

    Raises:
        TypeError: the function returned something else.
        ValueError: it shares parameters with the model, or its weights have NaN.
        CheckpointError: the weights do not fit.
    """
    if isinstance(given, str | os.PathLike):
        module: nn.Module = copy.deepcopy(state.model)
        weights: str | None = (path := os.fspath(given))
        if path.isidentifier() and not os.path.exists(path):
            raise WrongValue(
                f"Distillation was given «teacher={given!r}», and no file has that name. Give a function that makes it: "
                f"«teacher={path}¦teacher='module:{path}'»; or the path of weights: «teacher='runs/a/latest'»."
            )
    else:
        made = given if isinstance(given, nn.Module) else given()
        if not isinstance(made, nn.Module):
            raise WrongType(
                f"The teacher of Distillation made a {type(made).__name__}. Give a function that returns a torch.nn.Module."
            )
        module, weights = made, None if weights_path is None else os.fspath(weights_path)
    if {id(each) for each in module.parameters()} & {id(each) for each in state.task.parameters()}:
        raise WrongValue(
            "The teacher of Distillation shares parameters with the model, and would change with it. Give a copy: "
            "copy.deepcopy(model)."
        )
    if weights is not None:
        from hocket.checkpoints import load_weights, read_weights

        tensors = read_weights(weights)
        try:
            load_weights(module, tensors)
        except CheckpointError as error:
            what, *misfits = str(error).partition("\nPass ")[0].splitlines()
            what = f"{what.rstrip('.')}: {'; '.join(misfits)}." if misfits else what
            raise CheckpointError(f"{what} Give Distillation weights of its teacher's architecture.") from error
    plain = {name: each for name, each in module.named_parameters() if type(each) is nn.Parameter}
    if broken := [name for name, each in plain.items() if each.itemsize > 1 and each.isnan().any()]:
        raise WrongValue(f"The teacher of Distillation has NaN in {', '.join(broken[:3])}. Load earlier weights.")
    return module


def as_student(task: SupervisedTask, teacher: nn.Module) -> Callable[[Any], Any]:
    """Return a function that calls the teacher as the task calls its model.

    A task with parameters of its own would apply them to the teacher's outputs: then the teacher gets the inputs alone.
    """
    if len(list(task.parameters())) > len(list(task.network.parameters())):
        task_of_inputs = SupervisedTask(teacher, task.loss_function, task.inputs, outputs=task.outputs)
        return task_of_inputs.forward
    like = copy.copy(task)  # shares buffers, such as means of images
    like.training = False
    like._modules = {**task._modules, "network": teacher}
    return like.forward
