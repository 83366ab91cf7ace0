"""The Wasserstein GAN with gradient penalty against a loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop
from torch import Tensor
from torch.optim import Adam


class TestWGANGP(Loop):
    example = "wgan_gp"
    batches = 10  # two steps of the generator

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        nets = example.WGANGP()
        generator, critic = nets.generator, nets.critic
        generator_adam = Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
        critic_adam = Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
        for number, real in enumerate(batches, start=1):
            z, mix = draw(torch.randn, len(real), 16), draw(torch.rand, len(real), 1)
            with torch.no_grad():
                fake = generator(z)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
            penalty = 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
            critic_adam.zero_grad()
            (penalty - (critic(real).mean() - critic(fake).mean())).backward()
            critic_adam.step()
            if number % 5 == 0:
                generator_adam.zero_grad()
                (-critic(generator(draw(torch.randn, len(real), 16))).mean()).backward()
                generator_adam.step()
        return nets.state_dict()
