"""Warn of tensors that a model carries from batch to batch in attributes of modules, which checkpoints do not save."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hocket.checkpoints.report import some
from hocket.help import warn
from hocket.state import State
from hocket.task import Task

#: The number of items of a list or dict that are examined.
_ITEMS = 100


class HiddenTensors:
    """Warn once, at a save, about tensors in attributes that have changed since the first batch.

    Constants and caches, such as those of rotary embeddings, are filled by then and do not change. Tensors with a graph belong
    to the current batch. Only weak references are kept, so that no tensor lives longer.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[weakref.ref[Tensor], int]] | None = None
        self._done = False

    def observe(self, state: State) -> None:
        """Record the model's tensors after the first batch; later calls do nothing."""
        if self._seen is None:
            self._seen = {name: (weakref.ref(tensor), tensor._version) for name, tensor in _hidden(state)}

    def warn(self, state: State) -> None:
        """Warn once about tensors in attributes that have changed since the first batch."""
        if self._done or self._seen is None or state.strategy.rank:
            return
        changed = []
        for name, tensor in _hidden(state):
            reference, version = self._seen.get(name, (None, 0))
            if reference is None or reference() is not tensor or tensor._version != version:
                changed.append(f"{type(state.model).__name__}.{name.removeprefix(state.model_prefix)}")
        if changed:
            self._done = True
            warn(
                f"{some(changed, 3)} changed in training, but checkpoints do not save tensors in attributes: a "
                "resumed run starts without them. If the next batch needs them, return them from Task.extra_state() and "
                "restore them in load_extra_state(state), or use register_buffer(). If not, set them to None after the batch."
            )


def _hidden(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in attributes of modules, by name.

    Tasks and modules that define an extra state are skipped, and metrics that were logged, which checkpoints save.
    """
    task = state.task
    if type(task).extra_state is not Task.extra_state:
        return
    known = {id(tensor) for tensor in [*task.parameters(), *task.buffers()]}
    saved = {id(part) for module in task.modules() if state.aggregates.logs(module) for part in module.modules()}
    for path, module in task.named_modules():
        if id(module) in saved or type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for place, tensor in _tensors(value):
                if id(tensor) not in known and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is None:
                    yield f"{path}.{attribute}{place}".removeprefix("."), tensor


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", each) for i, each in enumerate(value[:_ITEMS]) if isinstance(each, Tensor))
    elif isinstance(value, Mapping):
        for key in list(value)[:_ITEMS]:
            if isinstance(each := value[key], Tensor):
                yield f"[{key!r}]", each
