"""Compute losses on trial, without a trace in the task."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.basics import seeding

if TYPE_CHECKING:
    from hocket.state.state import State

#: Attributes of every module, which hold its parameters, submodules and hooks; not its mode.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
#: Arguments of batch normalization, which does not declare that it writes to them.
_WRITTEN = {"running_mean", "running_var"}
#: Arrays of more elements are taken for data, which nothing changes.
_LARGEST_ARRAY = 2**20


@contextmanager
def on_trial(state: State) -> Iterator[None]:
    """Compute as the strategy does, without changing the task, random numbers or logged values."""
    with seeding.preserved(), without_trace(state.task), state.unlogged(), state.bus.forward_context():
        yield


@contextmanager
def without_trace(task: nn.Module, watch: bool = True) -> Iterator[None]:
    """Restore afterwards what a computation changes: tensors, in place or as attributes, and collections in attributes.

    Objects in attributes that collect, such as metrics, are restored too. They are known by ``update`` and ``reset``.

    Args:
        watch: whether to copy any tensor before it is changed in place, which takes memory. Otherwise buffers are restored, and
            tensors in attributes unless they are large.
    """
    tensors: list[Tensor] = []
    undo: list[Callable[[], Any]] = []
    seen: set[int] = set()
    for module in task.modules():
        _note(module._buffers, undo, seen, tensors)
        _note(vars(module), undo, seen, tensors, _OF_MODULES)
    written = _Written()
    if not watch:
        written.note([*task.buffers(), *(tensor for tensor in tensors if tensor.numel() <= _LARGEST_ARRAY)])
    try:
        with written if watch else nullcontext():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in reversed(written.before):
                if tensor.untyped_storage().nbytes():  # FSDP frees gathered weights
                    tensor.copy_(value)
        for restore in reversed(undo):
            restore()


class _Written(TorchDispatchMode):
    """Copies tensors before an operator changes them in place.

    ``before``: the tensors, as ``data``, whose restoration autograd does not take for another change, and their values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for at, argument in enumerate(func._schema.arguments if func.namespace == "aten" else ()):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            if declared or argument.name in _WRITTEN:
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                self.note([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)])
        return func(*args, **kwargs)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors."""
        self.before += [(tensor.data, tensor.detach().clone()) for tensor in tensors]


def _note(
    value: object,
    undo: list[Callable[[], Any]],
    seen: set[int],
    tensors: list[Tensor],
    without: frozenset[str] = frozenset(),
) -> None:
    """Note how to restore a value and what it holds, and which tensors that are."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        items = {key: item for key, item in value.items() if key not in without}
        undo.append(lambda: _refill(value, items, without))
        inner = list(items.values())
    elif isinstance(value, list | deque):
        inner = list(value)
        undo.append(lambda: _replace(value, value.extend, inner))
    elif isinstance(value, set):
        inner = list(value)
        undo.append(lambda: _replace(value, value.update, inner))
    elif isinstance(value, tuple):
        inner = list(value)
    elif (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
        if value.size <= _LARGEST_ARRAY and value.flags.writeable:
            copied = value.copy()
            undo.append(lambda: numpy.copyto(value, copied))
    elif _collects(value):
        inner = [vars(value)]
    for item in inner:
        _note(item, undo, seen, tensors)


def _collects(value: object) -> bool:
    methods = (getattr(value, "update", None), getattr(value, "reset", None))
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and all(map(callable, methods))


def _replace(collection: Any, add: Callable[[Any], None], content: list[Any]) -> None:
    if len(collection) != len(content) or any(a is not b for a, b in zip(collection, content, strict=True)):
        collection.clear()
        add(content)


def _refill(mapping: dict[Any, Any], items: dict[Any, Any], without: frozenset[str]) -> None:
    for key in [key for key in mapping if key not in items and key not in without]:
        del mapping[key]
    for key, value in items.items():  # a Counter's `update` adds
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value
