"""Walk over everything that training can reach and change: attributes, items, closures, globals of own files."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import sys
import sysconfig
import types
import zlib
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdRef

from hocket.help.ours import is_ours
from hocket_checkpoints.frozen_weights import bits

#: The number of objects that a walk visits, of items of a collection, and of elements of tensors whose values are compared.
_OBJECTS, _ITEMS, _ELEMENTS = 50_000, 100, 2**22
#: Attributes of every module; its hooks are functions like others.
_OF_MODULES = frozenset(vars(nn.Module())) | {"_aggregates"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = {str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device}
_CONSTANTS = (*_PLAIN, Enum, slice, range)
_FOLLOWED = (types.FunctionType, types.MethodType, functools.partial, type, types.ModuleType)
_COLLECTIONS = (Mapping, list, tuple, set, frozenset, deque, UserDict, UserList)
_LIBRARIES = tuple(str(Path(sysconfig.get_path(each)).resolve()) for each in ("stdlib", "purelib", "platlib"))


def walk(
    roots: Iterable[tuple[str, Any]],
    known: Collection[int],
    enter: Callable[[str, Any], bool] = lambda path, value: True,
) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of all leaves below ``roots``: numbers, texts, tensors, arrays, generators, sizes.

    Classes, functions and globals are followed where they are defined outside of installed packages. Resources (objects with
    ``__exit__`` or ``close``), objects of hocket, torch and the standard library, and tensors with a graph, which belong to
    the current batch, are omitted. A walk ends after 50,000 objects; of a collection it sees 100 items.

    Args:
        known: ids of objects that are saved, which are not entered.
        enter: called with the path of every module and every other object with attributes; whether to look into it.
    """
    seen, left = set(known), _OBJECTS
    waiting = [(path, value) for path, value in reversed(list(roots))]
    while waiting and left:
        left -= 1
        path, value = waiting.pop()
        if _is_constant(value):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_leaf(value):
            yield path, value
            continue
        if isinstance(value, _COLLECTIONS):
            yield path, Size(len(value))
        elif not isinstance(value, _FOLLOWED) and not (_has_attributes(value) and enter(path, value)):
            continue
        waiting += reversed(list(_children(path, value)))


class Size(int):
    """The number of items of a collection; of a set also the hash of them."""


def fingerprint(value: Any) -> Any:
    """Return what two leaves with the same content have in common, without waiting for a device."""
    if _is_constant(value):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, numpy.random.RandomState):
            return repr(value.get_state())
        if isinstance(value, numpy.ndarray):
            return (value.shape, zlib.crc32(value.tobytes())) if value.size <= _ELEMENTS else WeakIdRef(value)
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "__next__"):
        return operator.length_hint(value, -1) if hasattr(value, "__length_hint__") else object()
    return type(value), value


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change, so that only its replacement can be seen."""
    kind = type(value)
    if kind is tuple:
        return all(type(each) in _PLAIN for each in value)
    return kind in _PLAIN or isinstance(value, _CONSTANTS)


def _of_tensor(tensor: Tensor) -> Any:
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested
    if odd or hasattr(tensor, "__tensor_flatten__") or isinstance(tensor, nn.Parameter) or tensor.numel() > _ELEMENTS:
        return WeakIdRef(tensor), tensor._version  # an id is given again once its tensor is freed
    with torch.no_grad():
        integers = bits(tensor).to(torch.int64)
        # On its device; odd factors, so that the order counts.
        total = (integers * torch.arange(1, 2 * len(integers) + 1, 2, device=tensor.device)).sum()
    return tensor.shape, tensor.dtype, total


def same(one: Any, other: Any) -> bool:
    """Whether two fingerprints are equal; waits for the device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return int(one) == int(other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is None
    if isinstance(value, torch.Generator | random.Random | itertools.count | bytearray):
        return True
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(
        value, numpy.ndarray | numpy.random.Generator | numpy.random.RandomState
    ):
        return True
    return hasattr(type(value), "__next__") and not isinstance(value, nn.Module) and not hasattr(value, "__exit__")


def _has_attributes(value: Any) -> bool:
    if isinstance(value, nn.Module | Optimizer | Dataset | types.SimpleNamespace):
        return True
    library = type(value).__module__.partition(".")[0]
    if library == "torch" or is_ours(library) or library in sys.stdlib_module_names - {"__main__"}:
        return False
    if isinstance(value, Tensor) or hasattr(type(value), "__exit__") or hasattr(type(value), "close"):
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{_short(key)}]", value[key]) for key in [*itertools.islice(value, _ITEMS)])
    elif isinstance(value, set | frozenset):
        items = [each for each in itertools.islice(value, _ITEMS) if isinstance(each, str | int | float)]
        yield f"{path}{{}}", Size(hash(frozenset(items)))
    elif isinstance(value, _COLLECTIONS):
        ends = range(len(value)) if len(value) <= _ITEMS else [*range(_ITEMS // 2), *range(-_ITEMS // 2, 0)]
        ordered: Any = value
        yield from ((f"{path}[{index}]", ordered[index]) for index in ends)
    elif isinstance(value, functools.partial):
        yield from ((path, each) for each in (value.func, *value.args))
        yield from ((f"{path}.{name}", each) for name, each in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield path, value.__self__
        yield path, value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, type):
        if is_own(value.__module__):
            yield from _of_class(value)
    elif not isinstance(value, types.ModuleType):
        yield from _of_object(path, value)


def _of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    slots, classes, own = _of_type(type(value))  # type: ignore[arg-type]  # mypy: a type is not Hashable
    attributes = getattr(value, "__dict__", {}) | {name: getattr(value, name) for name in slots if hasattr(value, name)}
    module = isinstance(value, nn.Module)
    if module:
        for part in (value._modules, value._parameters):
            yield from ((f"{path}.{name}", each) for name, each in part.items() if each is not None)
        for name, parameter in value._parameters.items():
            yield from ((f"{path}.{name}.{key}", each) for key, each in getattr(parameter, "__dict__", {}).items())
        yield from ((f"{path}.{name}", each) for name in _HOOKS for each in attributes[name].values())
    if module and type(value).get_extra_state is not nn.Module.get_extra_state:
        return
    given_only = is_ours(type(value).__module__)  # hocket keeps nothing but what it was given
    for name, each in attributes.items():
        if module and (name in _OF_MODULES or (not own and (each is True or each is False))):
            continue  # flags of libraries say that something is set up
        if not given_only or callable(each) or isinstance(each, Dataset):
            yield f"{path}.{name}", each
    yield from ((kind.__qualname__, kind) for kind in classes)


@functools.lru_cache(maxsize=4096)
def _of_type(kind: Any) -> tuple[tuple[str, ...], tuple[type, ...], bool]:
    """Return the names of slots, the classes of own files among the bases, and whether it is one of them."""
    given = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    slots = tuple(name for names in given for name in ([names] if isinstance(names, str) else names))
    return slots, tuple(each for each in kind.__mro__ if is_own(each.__module__)), is_own(kind.__module__)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for name, each in list(vars(kind).items()):
        function = getattr(each, "__func__", None) or getattr(each, "fget", None) or each
        if isinstance(function, types.FunctionType):
            yield f"{kind.__qualname__}.{name}", function
        elif not (name.startswith("__") and name.endswith("__")) and not hasattr(each, "__get__"):
            yield f"{kind.__qualname__}.{name}", each


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if not is_own(function.__module__):
        return
    name = path if "." not in path and "[" not in path else function.__name__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}:{variable}", cell.cell_contents
        except ValueError:  # a variable that is not yet assigned
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((f"{name}:default", each) for each in defaults if not isinstance(each, _CONSTANTS))
    yield from ((f"{name}.{key}", each) for key, each in vars(function).items())
    for variable in names_in(function.__code__):
        each = function.__globals__.get(variable)
        if isinstance(each, types.ModuleType):
            if is_own(each.__name__):
                yield from (
                    (f"{variable}.{key}", vars(each)[key]) for key in names_in(function.__code__) if key in vars(each)
                )
        elif each is not None:
            yield f"{name}:{variable}" if isinstance(each, _CONSTANTS) else variable, each


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


@functools.lru_cache(maxsize=4096)
def is_own(module: str | None) -> bool:
    """Whether a module is neither installed nor hocket's."""
    if module is None or is_ours(module) or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return module == "__main__"
    return not str(Path(file).resolve()).startswith(_LIBRARIES)


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, _CONSTANTS) else type(key).__name__
    return text if len(text) <= 40 else f"{text[:37]}…"
