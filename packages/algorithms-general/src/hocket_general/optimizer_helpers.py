"""What the steps of this package's optimizers share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hocket.errors import MissingPackage, WrongValue
from hocket.help import installing


def means(optimizer: Optimizer, weights: list[Tensor], name: str) -> list[Tensor]:
    """Return the state of that name of each weight; it begins as zeros."""
    for each in weights:
        if name not in optimizer.state[each]:
            optimizer.state[each][name] = torch.zeros_like(each)
    return [optimizer.state[each][name] for each in weights]


def steps_of(optimizer: Optimizer, weights: list[Tensor]) -> list[float]:
    """Count a step of each weight in its state, and return how many it has taken.

    By weight, as torch's AdamW counts: the first gradient of a layer that was frozen, or of an expert that no sample had
    reached, may come late, and its bias corrections are those of a first step.
    """
    for each in weights:
        if "step" not in optimizer.state[each]:
            optimizer.state[each]["step"] = torch.tensor(
                0.0
            )  # on the CPU, so that reading it does not wait for a device
    counts = [optimizer.state[each]["step"] for each in weights]
    torch._foreach_add_(counts, 1)
    return [count.item() for count in counts]


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of an optimizer's closure, called with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Raise ValueError for a hyperparameter out of its range."""
    if not lr >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
        raise WrongValue(
            f"«lr={lr}», «betas={betas}» and «weight_decay={weight_decay}» were given: give a learning rate and a weight decay "
            "of 0 or more, and betas in [0, 1)."
        )


def library(name: str) -> Any:
    """Return the module of a library that the extra ``optimizers`` installs. Raises ImportError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"This optimizer comes with {name}, which cannot be imported: {error}. Type: "
            f"{installing.command('optimizers', 'hocket-algorithms-general')}."
        ) from error
