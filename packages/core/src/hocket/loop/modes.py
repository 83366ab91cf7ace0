"""Train mode and eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hocket.help import optional_packages, warn
from hocket.state.task import Task


def train_mode(task: Task) -> None:
    """Put a model into train mode, with a warning, if all of it is in eval mode, as ``from_pretrained`` returns it.

    If some submodules are in train mode, those in eval mode stay so, such as a frozen BatchNorm. A warning names blocks with
    parameters to train among them, because a wrapped pretrained model looks the same. Modules that define ``train()``
    themselves decide which of their submodules join them.
    """
    _call_own_train(task)
    model = task.model
    if any(module.training for module in model.modules()):
        optional_packages.ask("modes.warn_of_parts", model)
        return
    model.train()
    warn(
        f"{type(model).__name__} was in eval mode, in which Dropout and BatchNorm do not train; it is put into train mode. To "
        "avoid this warning, call model.train() yourself, and then eval() on the submodules that should stay in eval mode."
    )


def _call_own_train(task: Task) -> None:
    """Call the ``train()`` of classes that override it, as the ``model.train()`` of a plain loop does.

    It may leave a frozen teacher in eval mode, for instance.
    """
    before = [(module, module.training) for module in task.modules()]
    for module, _ in before:
        if module.training and type(module).train is not nn.Module.train:
            module.train()
    _restore([(module, training and module.training) for module, training in before])


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:  # outer ones first
        if module.training is not training:
            module.train(training)  # models may override it, as LoRA does to unmerge weights
    for module, training in modes:
        module.training = training


@contextmanager
def eval_mode(task: Task) -> Iterator[None]:
    """Put the task into eval mode inside; afterwards restore the mode of every submodule, frozen ones included."""
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        yield
    finally:
        _restore(modes)
