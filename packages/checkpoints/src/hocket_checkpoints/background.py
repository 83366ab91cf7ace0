"""Copy and write a checkpoint in a thread, while training continues.

Parameters and optimizer states are copied while the gradients of the next batch are computed, everything else immediately.
The optimizer's step waits for the copy: `Checkpoints` wraps the action ``gradients``, which returns when the copy is done. An
interrupt in that moment has changed no weight, so the next fit continues with that batch. Before that, every operation of
torch that writes to a copied tensor waits, in a model, plug-in or data set, through ``.data`` too. Writes that bypass torch's
dispatcher, by NumPy through ``tensor.numpy()`` or inside compiled code, are not detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.basics.dtensors import local
from hocket_checkpoints.storage.snapshot import Snapshot, Staging

if TYPE_CHECKING:
    from hocket.state.state import State


class Background:
    """One checkpoint at a time: `start` it, `settle` it before weights change, `join` it."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._watch: _Watch | None = None

    def start(self, state: State, snapshot: Snapshot, write: Callable[[Exception | None], None]) -> None:
        """Copy the snapshot, the tensors that may wait in the thread, then call ``write`` there with the copy's exception."""
        places = {_address(each) for each in _stepped(state)} - {0}
        copied = threading.Event()
        try:
            copy_rest = self._staging.copy(snapshot, lambda tensor: _address(tensor) in places)

            def run() -> None:
                problem = None
                try:
                    copy_rest()
                except Exception as error:
                    problem = error
                copied.set()
                write(problem)

            thread = threading.Thread(target=run, name="hocket-checkpoint")
            thread.start()
        except Exception as error:  # out of memory, or no thread can be started
            write(error)
            return
        self._thread, self._watch = thread, _Watch(places, copied)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait for the copy. Called before weights change."""
        if self._watch is not None:
            self._watch.copied.wait()
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch = None

    def join(self) -> None:
        """Wait until the checkpoint is written."""
        self.settle()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Watch(TorchDispatchMode):
    """Intercept every operation of torch, and let none write to the addresses ``places`` before they are copied."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled, and do not look inside it."""
        return True

    def __init__(self, places: set[int], copied: threading.Event) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied = copied
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._places and any(_address(each) in self._places for each in _written(func, args, kwargs)):
            self.copied.wait()
            self._places = set()
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    for index, name in _outputs(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each


@cache
def _outputs(func: Any) -> tuple[tuple[int, str], ...]:
    """Return index and name of the arguments that an operation writes to, by its schema."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple((i, each.name) for i, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write)


def _stepped(state: State) -> Iterator[Tensor]:
    """Yield the tensors that optimizer steps change."""
    yield from state.task.parameters()
    for optimizer in state.optimizers:
        for kept in optimizer.state.values():
            values = kept.values() if isinstance(kept, Mapping) else (kept,)
            yield from (each for each in values if isinstance(each, Tensor))


def _address(tensor: Tensor) -> int:
    """Return the address of this rank's memory of a tensor; 0 without own memory, as in wrapper subclasses."""
    try:
        return local(tensor.detach()).untyped_storage().data_ptr()
    except RuntimeError:
        return 0
