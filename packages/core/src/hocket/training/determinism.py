"""Only deterministic kernels, during fit, evaluate and predict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.torch_version import TorchVersion

from hocket.devices import Device
from hocket.devices.cuda import CUDA


def prepare(device: Device) -> None:
    """Before a GPU is used: torch 2.9 runs cuBLAS deterministically only under an environment variable, which this sets.

    Raises RuntimeError where it is too late for that.
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
        raise RuntimeError(
            f"deterministic=True on a GPU needs {name}={known[0]} with torch {torch.__version__} when the process starts, "
            f"and it is {os.environ.get(name, 'not set')}. Type: {name}={known[0]} python …, or upgrade torch to 2.10."
        )
    os.environ[name] = known[0]


@contextmanager
def kernels() -> Iterator[None]:
    """Only deterministic kernels inside; torch raises where an operation has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
