"""A generative adversarial network of convolutions, after DCGAN (Radford, Metz and Chintala 2015, arXiv:1511.06434).

Two optimizers take turns on the minimax game of Goodfellow et al. (2014, eq. 1): the discriminator learns to tell
scikit-learn's handwritten digits from generated ones, the generator to deceive it (the non-saturating loss of section 3).
The networks have no batch norm, so a batch may be computed in microbatches.

    python examples/dcgan.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader

import hocket


class DCGAN(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 64, 4),  # 4 x 4 pixels
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 2, stride=2),  # 8 x 8
            nn.ReLU(),
            nn.Conv2d(32, 1, 3, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 1),
        )

    def train_batch(self, real: Tensor, step: Any) -> None:
        fake = self.generator(torch.randn(len(real), 16, 1, 1, device=real.device))
        step(self.discriminator_loss, {"real": real, "fake": fake.detach()}, "discriminator")
        step(self.generator_loss, {"fake": fake}, "generator")

    def discriminator_loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real, fake = self.discriminator(batch["real"]), self.discriminator(batch["fake"])
        return {"real": bce(real, torch.ones_like(real)), "fake": bce(fake, torch.zeros_like(fake))}

    def generator_loss(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.discriminator(batch["fake"])
        return bce(fake, torch.ones_like(fake))


def data(batch_size: int = 64) -> DataLoader[Any]:
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32).unsqueeze(1)
    return DataLoader(images, batch_size, shuffle=True, drop_last=True)


def make_trainer(**changes: Any) -> hocket.Trainer:
    adam = "adam(lr=1e-3, betas=(0.5, 0.999))"
    options = {"model": DCGAN(), "train_data": data(), "optimizer": {"generator": adam, "discriminator": adam}}
    return hocket.Trainer(**{**options, "duration": "30ep", "seed": 1, **changes})


if __name__ == "__main__":
    gan = DCGAN()
    make_trainer(model=gan, loggers=["progress"]).fit()
    for row in torch.cat([*gan.cpu().generator(torch.randn(5, 16, 1, 1)).squeeze(1)], dim=1):
        print("".join(" .:-=+*#%@"[int(9.99 * pixel)] * 2 for pixel in row))
