"""MAML against a loop by hand, which adapts to one wave after the other."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop
from torch import Tensor
from torch.nn.functional import linear, mse_loss, relu
from torch.optim import Adam


def network(weights: list[Tensor], x: Tensor) -> Tensor:
    a, b, c, d, e, f = weights
    return linear(relu(linear(relu(linear(x, a, b)), c, d)), e, f)


class TestMAML(Loop):
    example = "maml"
    microbatch = 7
    tolerance = 1e-6  # the example adapts to all waves at once: sums are in another order

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        task = example.MAML()
        weights = list(task.parameters())
        adam = Adam(weights, lr=1e-3)
        for batch in batches:
            losses = []
            for known, values, asked, targets in zip(*batch, strict=True):
                error = mse_loss(network(weights, known), values)
                slopes = torch.autograd.grad(error, weights, create_graph=True)
                adapted = [weight - 0.01 * slope for weight, slope in zip(weights, slopes, strict=True)]
                losses.append(mse_loss(network(adapted, asked), targets))
            adam.zero_grad()
            torch.stack(losses).mean().backward()
            adam.step()
        return dict(task.state_dict())

    def test_evaluation_adapts_too(self, loop: Any) -> None:
        batch = next(iter(loop.data(waves=25)))
        with loop.make_trainer(device="cpu") as trainer:
            task = trainer.state.model
            losses = trainer.evaluate({"unseen": [batch]})
            assert losses["unseen/loss"] == task.loss_of(batch).item()
            task.steps = 0
            assert trainer.evaluate({"unseen": [batch]})["unseen/loss"] > losses["unseen/loss"]
