"""The variational autoencoder against a loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam


class TestVAE(Loop):
    example = "vae"

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        nets = example.VAE()
        adam = Adam(nets.parameters(), lr=3e-3)
        for images in batches:
            noise = draw(torch.randn, len(images), 8)
            mean, log_variance = nets.encoder(images).chunk(2, dim=1)
            logits = nets.decoder(mean + (log_variance / 2).exp() * noise)
            reconstruction = binary_cross_entropy_with_logits(logits, images, reduction="sum")
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
            adam.zero_grad()
            (reconstruction + divergence).backward()
            adam.step()
        return nets.state_dict()
