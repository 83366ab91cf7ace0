"""Process-wide state, which plug-ins must not change."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections import Counter
from types import FunctionType
from typing import Any

import torch

#: Of `torch.nn.modules.module`: hooks that act on every module of the process.
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_THREADS = "running threads"


def footprint(below: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return process-wide state by name, as values that can be compared and pickled; see `functions` for ``below``."""
    modules = torch.nn.modules.module
    root = logging.getLogger()
    return {
        "os.environ": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "the working directory": os.getcwd(),
        "the handlers of signals": {int(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "the root logger": (root.level, [repr(handler) for handler in root.handlers]),
        "logging.disable": logging.root.manager.disable,
        "sys.excepthook": repr(sys.excepthook),
        _THREADS: sorted(thread.name for thread in threading.enumerate()),
        "the global random numbers": _random_numbers(),
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": torch.get_num_threads(),
        "whether gradients are enabled": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        ),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "cuDNN and TF32": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
        ),
        "hooks on all modules": {name: len(getattr(modules, name)) for name in _GLOBAL_HOOKS},
        "sys.path": list(sys.path),
        "standard output and errors": (id(sys.stdout), id(sys.stderr)),
        "the filters of warnings": [repr(each) for each in warnings.filters],
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "the recursion limit": sys.getrecursionlimit(),
        "the timeout of sockets": socket.getdefaulttimeout(),
        "how tensors are printed": repr(torch._tensor_str.PRINT_OPTS),
        "the umask": _umask(),
        _PATCHED: functions(below),
    }


_PATCHED = "functions of torch and hocket"
#: Modules whose functions and classes nobody may replace, and those below them that are compared once in a run.
_SHARED = (
    "builtins", "torch", "torch.autograd", "torch.nn.functional", "torch.nn.modules.module", "torch.optim.optimizer",
    "torch.utils.data.dataloader",
)  # fmt: skip
BELOW = (
    "torch.amp.", "torch.autograd.", "torch.cuda.", "torch.distributed.", "torch.functional.", "torch.nn.", "torch.optim.",
    "torch.random.", "torch.serialization.", "torch.utils.data.", "hocket.", "hocket_checkpoints.",
)  # fmt: skip
#: Of a class or module, what the interpreter or torch sets itself.
_OWN = {"__dict__", "__weakref__", "__class__", "__loader__", "__spec__", "__builtins__", "_dynamo", "_inductor"}
_TORCH = os.path.dirname(torch.__file__)


def functions(below: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the identity of each function, class and method of shared modules by name, with all modules ``below`` some."""
    found = _methods("torch.Tensor", torch.Tensor)
    for name, module in list(sys.modules.items()):
        if name in _SHARED or f"{name}.".startswith(below):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if issubclass(type(value), type) and vars(value).get("__module__") == name:
                    found |= {f"{name}.{key}": id(value)} | _methods(f"{name}.{key}", value)
                elif callable(value) and key not in _OWN:
                    found[f"{name}.{key}"] = _identity(value)
    return found


def _methods(name: str, cls: type) -> dict[str, int]:
    """Return the identity of each method, or 0 of an inherited one, which is compared where it is."""
    inherited = {key: value for base in cls.__mro__[-2:0:-1] for key, value in vars(base).items() if _binds(value)}
    found = {f"{name}.{key}": 0 for key in inherited}
    for key, value in vars(cls).items():
        if _binds(value) and key not in _OWN:
            identity = _identity(value)
            found[f"{name}.{key}"] = 0 if key in inherited and _identity(inherited[key]) == identity else identity
    return found


def _binds(value: Any) -> bool:
    return callable(value) or issubclass(type(value), property | staticmethod | classmethod)


def _identity(value: Any) -> int:
    """Return the id of a function, below what torch wraps around it when it is first used, such as an optimizer's step."""
    while (code := getattr(value, "__code__", None)) is not None and code.co_filename.startswith(_TORCH):
        if not isinstance(value, FunctionType) or "__wrapped__" not in vars(value):
            break
        value = vars(value)["__wrapped__"]
    return id(value)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _random_numbers() -> list[Any]:
    """Return the state of every global generator in use."""
    numbers: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    if numpy := sys.modules.get("numpy"):
        numbers.append([item.tobytes() if hasattr(item, "tobytes") else item for item in numpy.random.get_state()])
    if torch.cuda.is_initialized():
        numbers.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return numbers


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ between two footprints, replaced functions by their own names.

    Threads may end meanwhile, such as idle ones, and modules gain functions when parts of them are first used.
    """
    names = []
    for name, value in before.items():
        if name == _THREADS:
            names += [name] if Counter(after[name]) - Counter(value) else []
        elif name == _PATCHED:
            names += [each for each, identity in value.items() if after[name].get(each) != identity]
        elif value != after[name]:
            names.append(name)
    return names
