"""The logits that `Distillation` compares, and the dimension of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.basics.losses import classes
from hocket.data import items
from hocket.errors import WrongType, WrongValue
from hocket.state.task import SupervisedTask, Task


def logits_of(outputs: Any, key: Any, whose: str) -> Tensor:
    """Return the logits among a model's outputs. Raises TypeError if there are none at ``key``."""
    found = outputs
    if key is not None and not isinstance(outputs, Tensor):
        found = items.part(outputs, key, f"{whose}'s output")
    elif not isinstance(outputs, Tensor):
        found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise WrongType(
            f"Distillation needs floating-point logits, and the {whose} returned {type(outputs).__name__}. Say where they are "
            "with output_key=, such as «output_key=0»."
        )
    return found


def class_dim_of(task: Task, logits: Tensor, targets: Tensor | None, dim: int | None) -> int:
    """Return ``dim``, or the dimension of the classes. Raises ValueError if it is uncertain, or has no two classes."""
    shape = logits.shape
    if dim is None:
        dim = _class_dim(task, shape, targets) if len(shape) > 2 else 1
    if dim is None:
        raise WrongValue(
            f"Distillation cannot tell which dimension of the logits, of shape {tuple(shape)}, has the classes. Write "
            "«class_dim=-1» if it is the last one, as in language models, or «class_dim=1» for (N, classes, ...)."
        )
    if len(shape) < 2 or not -len(shape) <= dim < len(shape) or shape[dim] < 2:
        where = f"logits of shape {tuple(shape)} do not have two or more classes in dimension {dim} (class_dim=)"
        raise WrongValue(_not_classes(where))
    return dim


def _class_dim(task: Task, shape: torch.Size, targets: Tensor | None) -> int | None:
    """Return the dimension of the classes in logits of three or more dimensions; None if it is uncertain."""
    loss = task.loss_function if isinstance(task, SupervisedTask) else None
    if classes(loss) is not None:
        return 1
    if targets is not None:
        first, last = targets.shape == shape[:1] + shape[2:], targets.shape == shape[:-1]
        return None if first is last else 1 if first else -1
    own = isinstance(task, SupervisedTask) and loss is None
    return -1 if own and len(shape) == 3 else None


def check_loss(task: Task) -> None:
    """Raise ValueError for a loss that trains each output by itself."""
    loss = task.loss_function if isinstance(task, SupervisedTask) else None
    function = loss.func if isinstance(loss, partial) else loss
    if function in _BINARY or isinstance(function, _BINARY[:2]):
        raise WrongValue(_not_classes(f"the loss is {getattr(function, '__name__', type(function).__name__)}"))


def check_targets(targets: Any, logits: Tensor, dim: int) -> None:
    """Raise ValueError for dense targets that are not class probabilities."""
    if isinstance(targets, Tensor) and targets.shape == logits.shape:
        sums = targets.sum(dim, dtype=torch.float32)
        if bool((targets < 0).any()) or not bool(((sums == 0) | ((sums - 1).abs() < 1e-2)).all()):
            raise WrongValue(
                _not_classes(
                    f"targets of shape {tuple(targets.shape)} from {targets.min():.3g} to {targets.max():.3g} are not "
                    "class probabilities, which sum to 1"
                )
            )


#: Losses of outputs that each have a probability of their own.
_BINARY: tuple[Any, ...] = (
    nn.BCEWithLogitsLoss, nn.BCELoss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy,
)  # fmt: skip


def _not_classes(why: str) -> str:
    return (
        f"Distillation compares the probabilities of classes that exclude each other, and {why}. For regression and several "
        "labels a sample, write «alpha=0» with «features=[…]», or compare with the teacher in the loss of a hocket.Task, such "
        "as by mse_loss(outputs, taught) or binary_cross_entropy_with_logits(outputs, taught.sigmoid())."
    )
