"""Train mode and eval mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hocket.task import Task


def train_mode(task: Task) -> None:
    """Put a model that is in eval mode as a whole, as every ``from_pretrained`` returns it, into train mode, and say so.

    Submodules in eval mode stay so where others are in train mode, such as frozen BatchNorm. Whole blocks with parameters to
    train are named, since wrapping a pretrained model looks the same.
    """
    model, kind = task.model, type(task.model).__name__
    names = [name for name, module in model.named_modules() if module.training]
    if not names:
        model.train()
        message = (
            f"{kind} was in eval mode, in which Dropout and BatchNorm do not train; it is put into train mode. Put it there "
            "yourself, with model.train(), and then those submodules into eval mode that should stay in it."
        )
    elif not model.training:
        message = (
            f"{kind} is in eval mode and parts of it in train mode ({_some(names)}), and stays so. Type model.train() "
            "before fit to put all of it into train mode."
        )
    elif blocks := _blocks(model):
        message = (
            f"Submodules with parameters to train are in eval mode, in which Dropout and BatchNorm do not train, and stay so: "
            f"{_some(blocks)}. Type model.train() before fit to put all of them into train mode."
        )
    else:
        return
    warnings.warn(message, stacklevel=5)


def _blocks(model: nn.Module) -> list[str]:
    """The outermost submodules in eval mode that have submodules and parameters to train."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training and not inside and trained and any(True for _ in module.children()):
            found.append(name)
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def eval_mode(task: Task) -> Iterator[None]:
    """``task.eval()`` inside; afterwards every submodule has the mode back that it had, frozen ones included."""
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        yield
    finally:
        for module, training in modes:  # outer ones first
            if module.training is not training:
                module.train(training)  # which a model may override, as LoRA does to take merged weights apart
        for module, training in modes:
            module.training = training
