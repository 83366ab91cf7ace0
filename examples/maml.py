"""Model-agnostic meta-learning: weights from which one gradient step fits a sine wave seen at ten points.

    python examples/maml.py

After Finn, Abbeel and Levine (2017, arXiv:1703.03400), algorithm 2: `adapt` is the inner step, the Trainer takes the outer
one, equation 1. A sample is one wave, so microbatches and ranks divide waves. `torch.func.grad` differentiates through the
inner step, in evaluation too, where gradients are off; `torch.func.vmap` adapts to all waves at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hocket

Wave = list[Tensor]  # inputs and targets to adapt to, inputs and targets to be right about; (waves, points, 1) each


class MAML(hocket.Task):
    """The meta-learner of a network; ``steps`` of size ``lr`` adapt its weights to a wave."""

    def __init__(self, steps: int = 1, lr: float = 0.01) -> None:
        super().__init__()
        self.steps, self.lr = steps, lr
        self.network = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def error(self, weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return mse_loss(functional_call(self.network, weights, inputs), targets)

    def adapt(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        weights = dict(self.network.named_parameters())
        for _ in range(self.steps):
            slopes = grad(self.error)(weights, inputs, targets)
            weights = {name: weight - self.lr * slopes[name] for name, weight in weights.items()}
        return weights

    def forward(self, waves: Wave) -> Tensor:
        known, values, asked, _ = waves
        return vmap(lambda *wave: functional_call(self.network, self.adapt(*wave[:2]), wave[2]))(known, values, asked)

    def loss(self, outputs: Tensor, waves: Wave) -> Tensor:
        return mse_loss(outputs, waves[3])


def data(waves: int = 10_000, batch_size: int = 25, points: int = 10, seed: int = 0) -> DataLoader[Any]:
    """Sine waves of random amplitude and phase, each at ``points`` random places to adapt to and as many to predict."""
    generator = torch.Generator().manual_seed(seed)
    height, phase, *places = (torch.rand(waves, size, 1, generator=generator) for size in (1, 1, points, points))
    known, asked = (10 * place - 5 for place in places)
    values, targets = ((0.1 + 4.9 * height) * torch.sin(x - math.pi * phase) for x in (known, asked))
    return DataLoader(TensorDataset(known, values, asked, targets), batch_size, shuffle=True, generator=generator)


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": MAML(), "train_data": data(), "optimizer": "adam(lr=1e-3)", "duration": "3ep", "seed": 1}
    return hocket.Trainer(**options | changes)


if __name__ == "__main__":
    torch.manual_seed(1)
    trainer = make_trainer(loggers=["progress"])
    unseen = {"unseen": data(waves=1000, seed=1)}
    before = trainer.evaluate(unseen)["unseen/loss"]
    trainer.fit()
    after = trainer.evaluate(unseen)["unseen/loss"]
    print(f"squared error on unseen waves after one step: {before:.2f} before training, {after:.2f} after")
