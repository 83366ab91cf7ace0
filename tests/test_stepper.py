"""`Runtime.stepper`: the steps of a custom loop, against the same loop in plain PyTorch."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import hocket
from hocket.testkit import run_ranks
from hocket.testkit.ranks import RankError

SIZE, CLIP = 8, 0.5


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.critic = mlp(4, 6), mlp(6, 1)

    def optimizers(self) -> dict[str, Optimizer]:
        parts = {"generator": self.generator, "critic": self.critic}
        return {name: Adam(part.parameters(), lr=0.01) for name, part in parts.items()}


#: A step: the loss function, its batch, and the optimizer's name.
Step = Callable[[Callable[[Any], Any], Any, str], Any]


def dcgan(nets: Nets, batch: Any, step: Step, number: int) -> None:
    def critic_loss(batch: Any) -> Tensor:
        return real_or_not(nets.critic(batch["real"]), True) + real_or_not(nets.critic(batch["fake"]), False)

    def generator_loss(batch: Any) -> Tensor:
        return real_or_not(nets.critic(batch["fake"]), True)

    fake = nets.generator(batch["z"])
    step(critic_loss, {"real": batch["real"], "fake": fake.detach()}, "critic")
    step(generator_loss, {"fake": fake}, "generator")


def wgan_gp(nets: Nets, batch: Any, step: Step, number: int) -> None:
    def critic_loss(batch: Any) -> dict[str, Tensor]:
        fake = nets.generator(batch["z"]).detach()
        between = (batch["mix"] * batch["real"] + (1 - batch["mix"]) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(nets.critic(between).sum(), between, create_graph=True)
        distance = nets.critic(fake).mean() - nets.critic(batch["real"]).mean()
        return {"distance": distance, "penalty": 10 * ((slope.norm(2, 1) - 1) ** 2).mean()}

    def generator_loss(batch: Any) -> Tensor:
        return -nets.critic(nets.generator(batch["z"])).mean()

    step(critic_loss, batch, "critic")
    if number % 3 == 2:
        step(generator_loss, {"z": batch["z"]}, "generator")


LOOPS = [dcgan, wgan_gp]


def batches() -> list[dict[str, Tensor]]:
    """The last batch is smaller."""
    generator = torch.Generator().manual_seed(4)
    drawn: list[dict[str, Tensor]] = []
    for size in (*[SIZE] * 6, 5):
        real = torch.randn(size, 6, generator=generator) + 1
        noise, mix = torch.randn(size, 4, generator=generator), torch.rand(size, 1, generator=generator)
        drawn.append({"real": real, "z": noise, "mix": mix})
    return drawn


def by_hand(loop: Any, half: bool = False) -> dict[str, Tensor]:
    nets = Nets()
    optimizers = nets.optimizers()
    scalers = {name: torch.amp.GradScaler("cpu", enabled=half) for name in optimizers}

    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.float16) if half else nullcontext()

    def step(loss_function: Any, batch: Any, name: str) -> None:
        nets.zero_grad()
        with context():
            loss = loss_function(batch)
        loss = loss if isinstance(loss, Tensor) else torch.stack([*loss.values()]).sum()
        scalers[name].scale(loss).backward()
        scalers[name].unscale_(optimizers[name])
        torch.nn.utils.clip_grad_norm_([p for p in optimizers[name].param_groups[0]["params"]], CLIP)
        scalers[name].step(optimizers[name])
        scalers[name].update()

    for number, batch in enumerate(batches()):
        loop(nets, batch, step, number)
    return {name: value.detach() for name, value in nets.state_dict().items()}


def trained(loop: Any, microbatch: int | None = None, **options: Any) -> dict[str, Tensor]:
    runtime = hocket.Runtime(device="cpu", **options)
    nets = Nets()
    model, generator, critic = runtime.setup(nets, *nets.optimizers().values())
    step = runtime.stepper(model, generator=generator, critic=critic, microbatch=microbatch, clip=CLIP)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every rank reads all of the list")
        data = runtime.setup_data(batches(), global_batch=None if runtime.world_size == 1 else SIZE)
    for number, batch in enumerate(data):
        loop(nets, batch, step, number)
    return runtime.model_state(model)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_bits_as_by_hand(loop: Any) -> None:
    assert difference(trained(loop), by_hand(loop)) == 0
    assert difference(by_hand(loop), {name: value.detach() for name, value in Nets().state_dict().items()}) > 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_weights_in_microbatches(loop: Any) -> None:
    assert difference(trained(loop, microbatch=3), by_hand(loop)) < 2e-6


def test_each_step_has_a_loss_scale() -> None:
    """At first the scale overflows, in some steps and not in others."""
    assert difference(trained(dcgan, precision="fp16"), by_hand(dcgan, half=True)) == 0


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize(
    "loop, strategy", [(dcgan, "ddp"), (wgan_gp, "ddp"), (wgan_gp, {"fsdp": {"wrap": ["Sequential"]}})]
)
def test_the_same_weights_over_two_ranks(loop: Any, strategy: Any, microbatch: int | None) -> None:
    """Each has a slice of each batch, of the last one 3 and 2 samples."""
    first, second = run_ranks(lambda rank: trained(loop, microbatch, strategy=strategy), 2)
    assert difference(first, second) == 0
    assert difference(first, by_hand(loop)) < 2e-6
