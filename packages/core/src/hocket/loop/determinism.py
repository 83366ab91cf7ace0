"""Restrict fit, evaluate and predict to deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.torch_version import TorchVersion

from hocket.devices import Device
from hocket.devices.cuda import CUDA
from hocket.errors import WrongState


def prepare(device: Device) -> None:
    """Set the environment variable that torch before 2.10 needs for a deterministic cuBLAS. Call it before a GPU is used.

    Raises RuntimeError if CUDA is initialized already, or if the variable has another value.
    """
    known, name = (":4096:8", ":16:8"), "CUBLAS_WORKSPACE_CONFIG"
    if (
        not isinstance(device, CUDA)
        or torch.version.hip
        or TorchVersion(torch.__version__) >= "2.10"
        or os.environ.get(name) in known
    ):
        return
    if name in os.environ or torch.cuda.is_initialized():
        raise WrongState(
            f"«deterministic=True» on a GPU needs {name}={known[0]} with torch {torch.__version__} when the process starts, "
            f"and it is {os.environ.get(name, 'not set')}. Type: {name}={known[0]} python …, or upgrade torch to 2.10."
        )
    os.environ[name] = known[0]


@contextmanager
def kernels() -> Iterator[None]:
    """Use deterministic kernels only. Inside, torch raises for operations without one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
