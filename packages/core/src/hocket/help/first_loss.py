"""Check outputs and targets of the first batch of a fit, whose loss may be wrong without an error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.task import SupervisedTask, Task

#: The start of torch's warning for a loss that broadcasts.
_BROADCASTS = "Using a target size"


def watch(task: Task) -> None:
    """Check the task's next loss. Later ones are not slowed down: the check removes itself."""
    if task.owns_steps or "loss" in vars(task):
        return

    def checked(outputs: Any, batch: Any) -> Any:
        vars(task).pop("loss", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            returned = task.loss(outputs, batch)
        for each in caught:
            if str(each.message).startswith(_BROADCASTS):
                raise ValueError(_broadcast(str(each.message), outputs)) from None
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if isinstance(task, SupervisedTask) and isinstance(outputs, Tensor):
            _check_values(task.loss_function, outputs)
        return returned

    vars(task)["loss"] = checked  # found before the method of the class


def _broadcast(warned: str, outputs: Any) -> str:
    shapes = [part.partition("])")[0].partition("([")[2] for part in warned.split("torch.Size")[1:3]]
    found = f"outputs of shape ({shapes[1]}) and targets of shape ({shapes[0]})" if len(shapes) == 2 else warned
    return (
        f"The loss was given {found}, which broadcast: each output is compared with every target. Both should have the same "
        "shape. Write outputs.squeeze(1) at the end of the model, or targets.unsqueeze(1) in the data."
    )


def _check_values(loss: Callable[..., Any] | None, outputs: Tensor) -> None:
    """Warn if outputs are probabilities where a loss of torch takes logits, or the reverse."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if outputs.dim() < 2 or outputs.shape[1] < 2 or not outputs.is_floating_point() or type(outputs) is not Tensor:
        return
    with torch.no_grad():
        sums = outputs.detach().float().logsumexp(1)
        if (isinstance(function, nn.NLLLoss) or function is F.nll_loss) and not sums.abs().lt(1e-2).all():
            raise ValueError(
                f"nll_loss takes log-probabilities, whose exponentials add up to 1, and the outputs of shape "
                f"{tuple(outputs.shape)} are not. Write loss=torch.nn.functional.cross_entropy, which takes logits, or end the "
                "model with torch.nn.LogSoftmax(dim=1)."
            )
        cross_entropy = isinstance(function, nn.CrossEntropyLoss) or function is F.cross_entropy
        if cross_entropy and outputs.min() >= 0 and (outputs.float().sum(1) - 1).abs().lt(1e-3).all():
            warnings.warn(
                f"The outputs of shape {tuple(outputs.shape)} are probabilities, which add up to 1, and cross_entropy takes "
                "logits: training is much slower. Remove the softmax at the end of the model, or write "
                "loss=lambda outputs, targets: torch.nn.functional.nll_loss(outputs.log(), targets).",
                stacklevel=4,
            )
