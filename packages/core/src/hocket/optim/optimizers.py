"""Optimizers: made from what the Trainer was given, checked, and repaired after surgery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hocket.plugins.spec import build
from hocket.surgery import Replacement, update_optimizer
from hocket.task import Task


def make_optimizers(given: Any, task: Task, replacements: Sequence[Replacement]) -> list[Optimizer]:
    """The optimizers of a run.

    Args:
        given: an Optimizer; a function of the list of parameters that returns one; a name or configuration such as
            ``"adamw(lr=1e-3)"``; a sequence of those; or None to ask ``task.configure_optimizers()``.
        task: after surgery; its model's parameters are what optimizers may hold.
        replacements: what surgery replaced; instances are repaired by them.

    Raises:
        TypeError: what was given is none of these. ValueError: an optimizer holds no parameters, parameters that the
            model does not have, or one that another holds. RuntimeError: an instance has state and surgery was done.
    """
    if given is None:
        given = task.configure_optimizers()
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, str)
    optimizers = [_make(item, task, replacements) for item in (given if several else [given])]
    _check(optimizers, task)
    return optimizers


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether it computes gradients in its steps: LBFGS, and classes that say ``requires_closure = True``."""
    return closure_class(type(optimizer))  # type: ignore[arg-type]  # classes are hashable


def step(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    """``optimizer.step()``, with the closure for those that need one.

    Torch puts a record for profilers and the calls of hooks around the step of every class. Where nobody profiles and there
    are no hooks, what it is put around is called: the record takes up to a tenth of a step of a millisecond.
    """
    kind = type(optimizer)
    if closure_class(kind):  # type: ignore[arg-type]  # classes are hashable
        optimizer.step(closure)
        return
    inside = _inside(kind.step)
    if (
        inside is None
        or "step" in vars(optimizer)
        or _profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        optimizer.step()
    else:
        inside(optimizer)


@cache
def closure_class(kind: type[Optimizer]) -> bool:
    """`needs_closure` of a class, without a function call in every batch."""
    return issubclass(kind, torch.optim.LBFGS) or bool(getattr(kind, "requires_closure", False))


@cache
def _inside(method: Any) -> Callable[[Optimizer], Any] | None:
    """What torch's record was put around, if that is what ``method`` is; others may have put something around it."""
    recorded = getattr(method, "__code__", None) is _RECORD
    return method.__wrapped__ if recorded else None


_RECORD = Optimizer.profile_hook_step(lambda: None).__code__


def _make(given: Any, task: Task, replacements: Sequence[Replacement]) -> Optimizer:
    if isinstance(given, Optimizer):
        if replacements:
            update_optimizer(given, replacements)
        return given
    parameters = list(task.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"{type(task.model).__name__} has no parameter that requires a gradient, so there is nothing to optimize. "
            "Leave out optimizer= to evaluate or predict only, or set requires_grad on what should be trained."
        )
    if isinstance(given, str | Mapping):
        made = build("optimizers", given, parameters).obj
    elif callable(given):
        made = given(parameters)
    else:
        made = given
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer={given!r} gave {type(made).__name__}, not a torch.optim.Optimizer. Pass a function of the "
            "parameters, such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), an optimizer, or a name such "
            "as 'adamw(lr=1e-3)'."
        )
    return made


def _check(optimizers: Sequence[Optimizer], task: Task) -> None:
    known = set(task.parameters())
    held: set[torch.Tensor] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not parameters:
            raise ValueError(
                f"{name} holds no parameters. Give it the model's: torch.optim.{name}(model.parameters())."
            )
        if foreign := parameters - known:
            raise ValueError(
                f"{name} holds {len(foreign)} of {len(parameters)} parameters that are not in the model, so stepping it "
                f"would not train {type(task.model).__name__}. Make it from this model's parameters, or give a function: "
                f"optimizer=lambda parameters: torch.optim.{name}(parameters, …)."
            )
        if held & parameters:
            raise ValueError(
                f"{name} holds parameters that another optimizer holds; each would be stepped twice a batch."
            )
        held |= parameters
