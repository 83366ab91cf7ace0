"""The conformance suite, and the formula of the paper."""

from __future__ import annotations

import math

import hocket.testkit
import pytest
import torch
from torch import nn

from hocket_gradient_noise import (
    GradientNoise,
    add_gradient_noise,
    standard_deviation,
)


class TestGradientNoise(hocket.testkit.AlgorithmConformance):
    def make(self) -> GradientNoise:
        return GradientNoise(eta=1e-4)


@pytest.mark.parametrize("step, variance", [(0, 0.01), (1, 0.01 / 2**0.55), (9, 0.01 / 10**0.55), (999, 2.2387e-4)])
def test_the_variance_of_equation_1(step: int, variance: float) -> None:
    assert standard_deviation(step) ** 2 == pytest.approx(variance, rel=1e-4)


@pytest.mark.parametrize("step", [0, 99])
def test_the_noise_has_that_variance_and_no_mean(step: int) -> None:
    weight = nn.Parameter(torch.zeros(200_000))
    weight.grad = torch.zeros_like(weight)
    add_gradient_noise([weight], step, eta=0.3, generator=torch.Generator().manual_seed(1))
    deviation = math.sqrt(0.3 / (1 + step) ** 0.55)
    assert weight.grad.std().item() == pytest.approx(deviation, rel=0.01)
    assert abs(weight.grad.mean().item()) < 4 * deviation / math.sqrt(len(weight))


def test_it_is_added_to_the_gradient_of_every_batch() -> None:
    """Against a loop that adds the same numbers by hand; frozen parameters get none."""
    data = [(torch.rand(4, 3), torch.rand(4, 2)) for _ in range(3)]

    def network() -> nn.Linear:
        torch.manual_seed(2)
        made = nn.Linear(3, 2)
        made.bias.requires_grad_(False)
        return made

    algorithm, model = GradientNoise(eta=0.5, gamma=1.0), network()
    trainer = hocket.Trainer(
        model=model,
        loss=nn.functional.mse_loss,
        train_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        algorithms=[algorithm],
        duration="1ep",
        device="cpu",
        seed=3,
    )
    generator = torch.Generator().manual_seed(trainer.state.generator(algorithm).initial_seed())
    trainer.fit()

    plain = network()
    for step, (inputs, targets) in enumerate(data):
        plain.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        assert plain.weight.grad is not None
        with torch.no_grad():
            noise = torch.randn(2, 3, generator=generator) * math.sqrt(0.5 / (1 + step))
            plain.weight -= 0.1 * (plain.weight.grad + noise)
    torch.testing.assert_close(model.weight, plain.weight)
    torch.testing.assert_close(model.bias, plain.bias, rtol=0, atol=0)


def test_arguments_out_of_range() -> None:
    for arguments in ({"eta": -1.0}, {"gamma": -0.1}):
        with pytest.raises(ValueError, match="neither may be negative"):
            GradientNoise(**arguments)
