"""Small data and models that tests of every package combination share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(samples: int = 84, batch_size: int = 32, shuffle: bool = True) -> DataLoader[Any]:
    """Eight features, three classes; the last batch is smaller. The same order for every loader made this way."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    targets = torch.randint(3, (samples,), generator=generator)
    order = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=shuffle, generator=order)


def make_model(dropout: float = 0.0) -> nn.Module:
    """A small classifier, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum, so that a step remembers the ones before."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture
def data() -> Callable[..., DataLoader[Any]]:
    """See `make_data`."""
    return make_data


@pytest.fixture
def model() -> Callable[..., nn.Module]:
    """See `make_model`."""
    return make_model


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
