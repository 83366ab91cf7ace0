"""The inputs of a model: in which forms users give them, and which a task passes to its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hocket.errors import WrongType
from hocket_tools.beside import noted

if TYPE_CHECKING:
    from hocket.state.task import Task


class Inputs(NamedTuple):
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_inputs(given: Any) -> Inputs:
    """Return the arguments that a tensor, a tuple or list of positional ones, or a mapping of keyword ones stands for.

    A sequence of numbers is the shape of one float32 tensor, the batch included, such as ``(2, 3, 32, 32)``.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Tensor):
        return Inputs((given,), {})
    if isinstance(given, Mapping):
        return Inputs((), dict(given))
    if isinstance(given, tuple | list) and given:
        if all(isinstance(size, int) for size in given):
            return Inputs((torch.randn(*given, generator=torch.Generator().manual_seed(0)),), {})
        return Inputs(tuple(given), {})
    raise WrongType(
        f"The inputs of the model are {type(given).__name__}; give a tensor, a tuple of positional arguments, a dict of "
        "keyword arguments, or the shape of a tensor, such as «(2, 3, 32, 32)¦[2, 3, 32, 32]»."
    )


def inputs_of_batches(task: Task, batches: Iterable[Any], number: int) -> list[Inputs]:
    """Return what the task's model is called with for the first ``number`` batches, which are on the model's device."""
    seen: list[Inputs] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Inputs(args, kwargs))

    handle = task.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            for batch in islice(batches, number):
                with noted(task, batch):
                    task.eval_forward(batch)
    finally:
        handle.remove()
    return seen


def on_device_of(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return the inputs on the device of the model's first tensor."""
    device = next((tensor.device for tensor in model.state_dict().values() if isinstance(tensor, Tensor)), None)
    return Inputs(*tree_map_only(Tensor, lambda value: value.to(device), tuple(inputs)))


def leaves(inputs: Inputs) -> Iterator[Tensor]:
    """Yield the tensors of the inputs."""
    yield from (leaf for leaf in tree_leaves(tuple(inputs)) if isinstance(leaf, Tensor))
