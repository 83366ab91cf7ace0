"""The loaders that `hocket.Runtime.setup_data` accepts, and its calls of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

X, Y = torch.ones(8, 4), torch.zeros(8)
LOADER = DataLoader(TensorDataset(X, Y), 4)


class Module(hocket.data.DataModule):
    def train(self) -> Any:
        return LOADER


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorDataset(X, Y), "loader.*(DataLoader|iterable of batches)"),
        (lambda: (X, Y), "loader.*(DataLoader|iterable of batches)"),
        (lambda: [(X[0], 1), (X[1], 0)], "loader.*(DataLoader|iterable of batches)"),
        (lambda: "train.csv", "loader.*(DataLoader|iterable of batches)"),
        (lambda: 3, "loader.*(DataLoader|iterable of batches)"),
        (lambda: {"a": LOADER, "b": LOADER}, "loader is a .* of .*loaders"),
        (lambda: [LOADER, LOADER], "loader is a .* of .*loaders"),
        (Module, r"loader is a data module \(Module\)"),
    ],
)
def test_what_is_no_loader_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        hocket.Runtime(device="cpu").setup_data(make())


def test_several_loaders_are_iterated_in_turn() -> None:
    loaders = {"a": DataLoader(TensorDataset(X), 4), "b": DataLoader(TensorDataset(torch.ones(20, 4)), 4)}
    data = hocket.Runtime(device="cpu").setup_data(hocket.data.Several(loaders, "in turn"))
    assert [list(batch) for batch in data] == [["a"], ["b"]] * 2 + [["b"]] * 3


class Counting(hocket.Device):
    """The CPU, with a count of batches."""

    batches = 0

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def batch_end(self) -> None:
        self.batches += 1


def test_a_device_hears_of_batches_and_steps() -> None:
    device = Counting()
    runtime = hocket.Runtime(device=device)
    model, optimizer = runtime.setup(network := nn.Linear(2, 1), torch.optim.SGD(network.parameters(), lr=0.1))
    for batch in runtime.setup_data([torch.ones(3, 2)] * 4):
        runtime.backward(model(batch).mean())
    assert device.batches == 4
    runtime.step(optimizer)
    assert device.batches == 5
