"""Restore in place, bitwise, everything in memory that steps of a Trainer can change.

Checkpoints hold what a new process needs; a trial in the same process must also undo the rest: attributes of callbacks, caches,
gradients, what a fit adds. So a snapshot walks over all objects that can be reached, as
`hocket_checkpoints.reachable_state` does to find state that no checkpoint holds, and notes how to restore each one.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hocket.basics import seeding
from hocket.basics.dtensors import local
from hocket.basics.sparse_quantized import sized_like
from hocket.help.ours import is_ours
from hocket_checkpoints.reachable_state import is_own, names_in

#: In data sets: larger tensors and arrays (in elements) are samples, which training does not change; of longer collections the
#: items are.
_LARGEST_TENSOR, _LONGEST = 2**20, 1000
_CONSTANTS = (
    str, bytes, bool, int, float, complex, type(None), Enum, slice, range, torch.dtype, torch.device, types.ModuleType,
)  # fmt: skip
#: Modules whose objects belong to processes, threads and compilers, and do not count what was trained.
_MACHINERY = (
    "torch._", "torch.distributed.", "torch.fx.", "torch.multiprocessing", "torch.utils.data._utils", "torch.cuda", "pluggy",
)  # fmt: skip
_MISSING = object()


class Snapshot:
    """The present values of everything that can be reached from some objects.

    Iterators, files, processes and objects of the standard library other than collections and generators of random numbers
    are not looked into.

    Args:
        roots: objects to restore, such as a Trainer.
        data: data sets and loaders, whose samples are not copied.
        without: objects that nothing changes.
    """

    def __init__(self, roots: Iterable[Any], data: Iterable[Any] = (), without: Iterable[Any] = ()) -> None:
        self._undo: list[Callable[[], object]] = []
        #: The objects that were visited, by id; held, so that no other object gets the id.
        self._seen: dict[int, Any] = {id(each): each for each in without}
        self._generators = seeding.capture()
        data = list(data)
        self._walk(roots, {id(each) for each in data}, _LARGEST_TENSOR**2, 2**62)
        self._walk(data, set(), _LARGEST_TENSOR, _LONGEST)

    @torch.no_grad()
    def restore(self) -> None:
        """Give every object the values that it had."""
        for undo in self._undo:
            undo()
        seeding.restore(self._generators)

    def _walk(self, roots: Iterable[Any], barriers: set[int], largest: int, longest: int) -> None:
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if isinstance(value, _CONSTANTS) or id(value) in self._seen or id(value) in barriers:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                waiting += self._note_tensor(value, largest)
            elif not self._note_leaf(value, largest):
                waiting += self._note_object(value, longest)

    def _note_tensor(self, tensor: Tensor, largest: int) -> list[Any]:
        """Note a tensor, its gradient and its attributes. A result with a graph belongs to a batch, and is not restored."""
        if tensor.grad_fn is None and tensor.numel() <= largest and not _unwritable(tensor):
            self._undo.append(_restored_tensor(tensor))
        if not tensor.is_leaf:
            return []
        grad, needs = tensor.grad, tensor.requires_grad

        def undo() -> None:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad is not needs:
                tensor.requires_grad_(needs)

        self._undo.append(undo)
        return [grad, *([vars(tensor)] if getattr(tensor, "__dict__", None) else [])]

    def _note_leaf(self, value: Any, largest: int) -> bool:
        """Note a generator of random numbers or an array. Return whether it is one."""
        if isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif (numpy := sys.modules.get("numpy")) is None:
            return False
        elif isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            bits = getattr(value, "bit_generator", None) or value._bit_generator
            self._undo.append(functools.partial(setattr, bits, "state", bits.state))
        elif not isinstance(value, numpy.ndarray):
            return False
        elif value.size <= largest and value.flags.writeable and not value.dtype.hasobject:
            self._undo.append(functools.partial(numpy.copyto, value, value.copy()))
        return True

    def _note_object(self, value: Any, longest: int) -> Iterable[Any]:
        """Note a collection, a function, a class or an object with attributes. Return what it holds."""
        if isinstance(value, dict):
            return self._note_mapping(value) if len(value) <= longest else ()
        if isinstance(value, list | deque | set | bytearray):
            items = type(value)(value) if isinstance(value, bytearray) else list(value)
            self._undo.append(functools.partial(_refill, value, items))
            return items if len(items) <= longest else ()
        if isinstance(value, tuple | frozenset):
            return value if len(value) <= longest else ()
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, types.FunctionType):
            return self._note_function(value) if is_own(value.__module__) else ()
        if isinstance(value, type):
            return self._note_class(value) if is_own(value.__module__) else ()
        if isinstance(value, nn.parallel.DistributedDataParallel):
            return (value.module,)
        if not _has_state(value):
            return ()
        return [*self._note_attributes(value), *type(value).__mro__[:-1]]

    def _note_mapping(self, mapping: dict[Any, Any]) -> Iterable[Any]:
        items = dict(mapping.items())
        order = list(items)

        def undo() -> None:
            if list(mapping) != order:
                mapping.clear()
                mapping.update(items) if type(mapping).update is dict.update else _set_all(mapping, items)
                return
            for key, item in items.items():
                if mapping[key] is not item:
                    mapping[key] = item

        self._undo.append(undo)
        return items.values()

    def _note_attributes(self, value: Any) -> Iterator[Any]:
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            items = dict(own)

            def undo() -> None:
                for name in own.keys() - items:
                    del own[name]
                own.update(items)

            self._undo.append(undo)
            yield from items.values()
        for name in _slots(type(value)):  # type: ignore[arg-type]  # mypy: a type is not Hashable
            item = getattr(value, name, _MISSING)
            self._undo.append(functools.partial(_set, value, name, item))
            if item is not _MISSING:
                yield item

    def _note_function(self, function: types.FunctionType) -> Iterator[Any]:
        """Note the variables of a function of the user's: those it closes over, and the globals that it names."""
        for cell in function.__closure__ or ():
            try:
                item = cell.cell_contents
            except ValueError:  # a variable that is not yet assigned
                continue
            self._undo.append(functools.partial(_set, cell, "cell_contents", item))
            yield item
        yield from (function.__defaults__, function.__kwdefaults__, vars(function))
        variables = function.__globals__
        for name in names_in(function.__code__):
            if name in variables and not isinstance(item := variables[name], types.ModuleType):
                self._undo.append(functools.partial(operator.setitem, variables, name, item))
                yield item

    def _note_class(self, kind: type) -> Iterator[Any]:
        for name, item in list(vars(kind).items()):
            if name.startswith("__") and name.endswith("__") and not callable(item):
                continue
            function = getattr(item, "__func__", None) or getattr(item, "fget", None) or item
            if not isinstance(function, types.FunctionType) and not hasattr(item, "__get__"):
                self._undo.append(functools.partial(_set_of_class, kind, name, item))
            yield function


def _unwritable(tensor: Tensor) -> bool:
    """Whether a tensor has no values of its own: on meta, freed by a strategy, or several elements in one place."""
    if tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return tensor.is_meta
    overlap = any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return overlap or not tensor.untyped_storage().nbytes()


def _restored_tensor(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores a tensor's values, in its memory of now; the copy is on the CPU."""
    memory = tensor.detach() if tensor.is_inference() else tensor.data
    value = local(memory).to("cpu", copy=True)

    def undo() -> None:
        there = local(memory)
        if there.layout is torch.strided and not there.untyped_storage().nbytes():
            return  # FSDP has freed gathered weights
        if memory.layout is torch.strided and not tensor.is_inference() and _moved(tensor, memory):
            tensor.data = memory
        with torch.inference_mode(tensor.is_inference()):
            sized_like(there, value).copy_(value)

    return undo


def _moved(tensor: Tensor, memory: Tensor) -> bool:
    now, then = local(tensor.detach()), local(memory)
    return now.shape != then.shape or now.layout is not then.layout or now.data_ptr() != then.data_ptr()


def _has_state(value: Any) -> bool:
    """Whether attributes of an object are state: not those of iterators, resources and the standard library."""
    kind = type(value)
    module = kind.__module__
    if isinstance(value, nn.Module):
        return True
    if module.startswith(_MACHINERY) or hasattr(kind, "__next__"):
        return False
    library = module.partition(".")[0]
    if is_ours(module) or library == "torch":
        return True
    if library in sys.stdlib_module_names - {"__main__"} and kind is not types.SimpleNamespace:
        return isinstance(value, Mapping | list)
    return is_own(module) or not (hasattr(kind, "__exit__") or hasattr(kind, "close"))


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[str, ...]:
    given = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    names = (name for slots in given for name in ([slots] if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _set(value: Any, name: str, item: Any) -> None:
    if getattr(value, name, _MISSING) is item:
        return
    if item is _MISSING:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, item)


def _set_of_class(kind: type, name: str, item: Any) -> None:
    if vars(kind).get(name, _MISSING) is not item:
        setattr(kind, name, item)


def _set_all(mapping: dict[Any, Any], items: dict[Any, Any]) -> None:
    for key, item in items.items():  # a Counter's `update` adds
        mapping[key] = item


def _refill(collection: Any, items: Any) -> None:
    if isinstance(collection, bytearray):
        collection[:] = items
    elif len(collection) != len(items) or any(a is not b for a, b in zip(collection, items, strict=True)):
        collection.clear()
        (collection.update if isinstance(collection, set) else collection.extend)(items)
