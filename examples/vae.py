"""A variational autoencoder (Kingma and Welling 2013, arXiv:1312.6114) of scikit-learn's handwritten digits.

The loss is a sum over the batch: the negative of the lower bound in equation 10, with Bernoulli pixels and the divergence
of two Gaussians in closed form (appendix B). `loss_reduction="sum"` declares it, so that the gradients of microbatches and
ranks are added. The noise is drawn for the whole batch and is part of the loss function's batch.

    python examples/vae.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import hocket

CODE = 8  # dimensions of the code of an image


class VAE(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 128), nn.Tanh(), nn.Linear(128, 64))

    def train_batch(self, images: Tensor, step: Any) -> None:
        step(self.negative_bound, {"images": images, "noise": torch.randn(len(images), CODE, device=images.device)})

    def negative_bound(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(batch["images"]).chunk(2, dim=1)
        code = mean + (log_variance / 2).exp() * batch["noise"]
        logits = self.decoder(code)
        reconstruction = binary_cross_entropy_with_logits(logits, batch["images"], reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return {"reconstruction": reconstruction, "divergence": divergence}


def images() -> Tensor:
    return torch.tensor(load_digits().data / 16, dtype=torch.float32)


def data(batch_size: int = 64) -> DataLoader[Any]:
    return DataLoader(images()[:1500], batch_size, shuffle=True)


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": VAE(), "train_data": data(), "loss_reduction": "sum", "optimizer": "adam(lr=3e-3)"}
    return hocket.Trainer(**{**options, "duration": "40ep", "seed": 1, **changes})


if __name__ == "__main__":
    vae, held_out = VAE(), images()[1500:]
    batch = {"images": held_out, "noise": torch.randn(len(held_out), CODE)}
    before = vae.negative_bound(batch)
    make_trainer(model=vae, loggers=["progress"]).fit()
    after = vae.cpu().negative_bound(batch)
    for name in before:
        print(
            f"{name} of a held-out image: {before[name] / len(held_out):.1f} nats, then {after[name] / len(held_out):.1f}"
        )
