"""Check the first step of each loss function, which may train other parameters than is meant, or change the task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hocket.help import warn

if TYPE_CHECKING:
    from torch import nn

    from hocket.state.state import State


@contextmanager
def checked(state: State, function: str, caller: str, unnamed: Sequence[str]) -> Iterator[None]:
    """Warn before the step of all of several optimizers, and after it of numbers or tensors of the task that it changed.

    Args:
        function: the name of the loss function.
        caller: the user's code that calls the step.
        unnamed: the loss functions so far whose steps named no optimizer.
    """
    names = state.optimizer_names
    if len(unnamed) == 2 and len(names) > 1:
        warn(
            f"step(…) of {' and '.join(unnamed)} names no optimizer, so each of the two losses trains all of "
            f"{', '.join(map(repr, names))}. If one is for {names[0]!r} alone, write step(loss_function, batch, {names[0]!r})."
        )
    before = _attributes_of(state.task)
    yield
    after = _attributes_of(state.task)
    if changed := [name for name, value in after.items() if name in before and _differ(before[name], value)]:
        warn(
            f"{function} changes self.{changed[0]}, and may be called several times, as with microbatches. Change it in "
            f"{caller} after step(…); a tensor is returned by hocket.Loss(loss, kept=…) as step(…).kept."
        )


def _differ(before: Any, after: Any) -> bool:
    return (
        before is not after if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor) else before != after
    )


def _attributes_of(task: nn.Module) -> dict[str, int | float | str | torch.Tensor | None]:
    """Return the numbers, texts and tensors among the attributes of a task."""
    public = {name: value for name, value in vars(task).items() if name[0] != "_"}
    return {name: value for name, value in public.items() if isinstance(value, int | float | str | torch.Tensor | None)}
