"""The DCGAN against a loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import Adam


class TestDCGAN(Loop):
    example = "dcgan"
    rounding = 1e-5  # Adam divides a gradient by its size, so that a rounded gradient near 0 changes its step

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        nets = example.DCGAN()
        generator, discriminator = nets.generator, nets.discriminator
        generator_adam = Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        discriminator_adam = Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
        for real in batches:
            fake = generator(draw(torch.randn, len(real), 16, 1, 1))
            discriminator_adam.zero_grad()
            (bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)).backward()
            discriminator_adam.step()
            generator_adam.zero_grad()
            bce(discriminator(fake), ones).backward()
            generator_adam.step()
        return nets.state_dict()
