"""Process-wide state, which plug-ins must not change."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
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
        "hooks on all modules": {name: len(getattr(modules, name)) for name in _GLOBAL_HOOKS},
    }


def _random_numbers() -> list[Any]:
    """Return the state of every global generator in use."""
    numbers: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    if numpy := sys.modules.get("numpy"):
        numbers.append([item.tobytes() if hasattr(item, "tobytes") else item for item in numpy.random.get_state()])
    if torch.cuda.is_initialized():
        numbers.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return numbers


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ between two footprints. Threads may end meanwhile, such as idle ones."""
    return [
        name
        for name in before
        if (Counter(after[name]) - Counter(before[name]) if name == _THREADS else before[name] != after[name])
    ]
