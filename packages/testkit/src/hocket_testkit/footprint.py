"""Process-wide state, which plug-ins must not change."""

from __future__ import annotations

import builtins
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
#: Modules and classes whose attributes nobody may replace.
_SHARED: dict[str, Any] = {
    "builtins": builtins,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.utils.data.DataLoader": torch.utils.data.DataLoader,
}


def footprint() -> dict[str, Any]:
    """Return process-wide state by name, as values that can be compared and pickled."""
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
        **{f"{_PATCHED}{name}": _attributes(shared) for name, shared in _SHARED.items()},
    }


_PATCHED = "attributes of "
#: What torch itself sets when parts of it are first used.
_OWN = frozenset({"_dynamo", "_inductor", "manual_seed"})


def _attributes(shared: Any) -> dict[str, int]:
    return {name: id(value) for name, value in vars(shared).items() if name not in _OWN and not name.startswith("__")}


def _random_numbers() -> list[Any]:
    """Return the state of every global generator in use."""
    numbers: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    if numpy := sys.modules.get("numpy"):
        numbers.append([item.tobytes() if hasattr(item, "tobytes") else item for item in numpy.random.get_state()])
    if torch.cuda.is_initialized():
        numbers.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return numbers


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ between two footprints, patched attributes by their own names.

    Threads may end meanwhile, such as idle ones, and modules gain attributes when parts of them are first used.
    """
    names = []
    for name, value in before.items():
        if name == _THREADS:
            names += [name] if Counter(after[name]) - Counter(value) else []
        elif name.startswith(_PATCHED):
            there = after[name]
            replaced = [each for each, identity in value.items() if there.get(each) != identity]
            names += [f"{name.removeprefix(_PATCHED)}.{each}" for each in replaced]
        elif value != after[name]:
            names.append(name)
    return names
