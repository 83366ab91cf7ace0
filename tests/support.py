"""What tests of all packages share: small data and a model, a Trainer that works, weights, and equality to the last bit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.plugins import registry


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
    """The plainest optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD that remembers the steps before."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_trainer(**changes: Any) -> hocket.Trainer:
    """A Trainer of two epochs that works, but for what a test changes."""
    arguments = {"loss": F.cross_entropy, "optimizer": sgd, "duration": "2ep", **changes}
    if "model" not in changes:
        arguments["model"] = make_model()
    if "train_data" not in changes:
        arguments["train_data"] = make_data()
    return hocket.Trainer(**arguments)


def weights(of: hocket.Trainer | nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers of a Trainer's model, or of a module."""
    state = of.model_state_dict() if isinstance(of, hocket.Trainer) else of.state_dict()
    return [tensor.detach().clone() for tensor in state.values()]


def same(one: Any, other: Any) -> bool:
    """Whether trees of tensors and plain values are equal to the last bit; a NaN equals nothing."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


#: Arguments that callbacks need in order to be made, or to act in a short run without ending it.
_CALLBACKS: dict[str, dict[str, Any]] = {
    "early-stopping": {"monitor": "eval/loss", "patience": 99, "restore_best": False},
    "threshold-stopper": {"monitor": "train/loss", "above": 1e9},
    "memory-report": {"at": 4},
    "profiler": {"window": "1ba after 3ba"},
}
#: Callbacks that need another model than `make_model`.
_OF_OTHER_MODELS = {"generate", "save-pretrained"}


def installed_callbacks() -> list[str]:
    """The names of the callbacks of all installed hocket packages."""
    entries = [each for each in registry.entries("callbacks") if each.dist.partition("-")[0] == "hocket"]
    return sorted({each.name for each in entries} - _OF_OTHER_MODELS)


def callback_config(name: str, every: int) -> dict[str, Any]:
    """Arguments with which a callback acts within a run of some batches: each with ``every=`` does every so many batches."""
    [entry] = [each for each in registry.entries("callbacks") if each.name == name]
    argument = inspect.signature(entry.load()).parameters.get("every")
    interval = {} if argument is None else {"every": every if isinstance(argument.default, int) else f"{every}ba"}
    return {**interval, **_CALLBACKS.get(name, {})}
