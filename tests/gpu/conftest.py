"""Tests that need a GPU: ``pytest -m gpu tests/gpu``. They use it, after which no process can be forked, so by themselves.

``HOCKET_GPU_TESTS=cpu`` runs on the CPU those that can, to see that they are well-formed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_DEVICE = os.environ.get("HOCKET_GPU_TESTS", "cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is below this folder, and skip it without a GPU or among other tests."""
    reason = ""
    if "gpu" not in config.getoption("-m"):
        reason = "GPUs are used in a process of their own: pytest -m gpu tests/gpu"
    elif _DEVICE == "cuda" and not torch.cuda.device_count():
        reason = "torch sees no GPU here"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    """What tests compute on."""
    return _DEVICE


@pytest.fixture
def cuda(device: str) -> torch.device:
    """For tests that nothing else could stand for."""
    if device != "cuda":
        pytest.skip("asks CUDA itself")
    return torch.device("cuda", 0)
