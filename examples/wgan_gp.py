"""A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017, arXiv:1704.00028, equation 3 and algorithm 1).

The critic's loss contains the gradient of the critic with respect to its input, so that its own gradient is of second
order. The generator steps once in five steps of the critic. The data are scikit-learn's handwritten digits.

    python examples/wgan_gp.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hocket


class WGANGP(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )
        self.critic = nn.Sequential(
            nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
        )

    def train_batch(self, real: Tensor, step: Any) -> None:
        z, mix = torch.randn(len(real), 16, device=real.device), torch.rand(len(real), 1, device=real.device)
        step(self.critic_loss, {"real": real, "z": z, "mix": mix}, "critic")
        if step.batch % 5 == 4:
            step(self.generator_loss, torch.randn(len(real), 16, device=real.device), "generator")

    def critic_loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real, fake, mix = batch["real"], self.generator(batch["z"]).detach(), batch["mix"]
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        distance = self.critic(real).mean() - self.critic(fake).mean()
        penalty = 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return {"total": penalty - distance, "distance": distance}

    def generator_loss(self, z: Tensor) -> Tensor:
        return -self.critic(self.generator(z)).mean()


def data(batch_size: int = 64) -> DataLoader[Any]:
    return DataLoader(torch.tensor(load_digits().data / 16, dtype=torch.float32), batch_size, shuffle=True)


def make_trainer(**changes: Any) -> hocket.Trainer:
    adam = "adam(lr=1e-3, betas=(0.0, 0.9))"
    options = {"model": WGANGP(), "train_data": data(), "optimizer": {"generator": adam, "critic": adam}}
    return hocket.Trainer(**{**options, "duration": "40ep", "seed": 1, **changes})


if __name__ == "__main__":
    history = make_trainer(loggers=["progress"]).fit().history
    print("Wasserstein distance of generated from real digits, as the critic estimates it, in the course of training:")
    for part in torch.tensor(history["train/critic/distance"]).chunk(5):
        print(f"{part.mean():.2f}")
