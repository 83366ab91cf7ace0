"""Bootstrap your own latent, BYOL (Grill et al. 2020, arXiv:2006.07733, equations 1 and 2): features without labels.

The online network predicts what the target network makes of another view of the same image; the target is a moving average
of the online network. Batch norm keeps all images (scikit-learn's digits) from getting the same features. Its statistics
are those of a microbatch or of a rank's batch, so the loss depends on how a batch is split.

    python examples/byol.py
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample
from torch.utils.data import DataLoader

import hocket


def view(images: Tensor) -> Tensor:
    """Rotate, stretch, shear and shift each image at random, and add noise."""
    affine = torch.eye(2, 3, device=images.device) + 0.1 * torch.randn(len(images), 2, 3, device=images.device)
    moved = grid_sample(images, affine_grid(affine, list(images.shape), align_corners=False), align_corners=False)
    return moved + 0.1 * torch.randn_like(images)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    norm = nn.BatchNorm1d(128, track_running_stats=False)  # of the batch, in evaluation too
    return nn.Sequential(nn.Linear(inputs, 128), norm, nn.ReLU(), nn.Linear(128, outputs))


class BYOL(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()
        self.online = nn.Sequential(*encoder, mlp(128, 32))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = mlp(32, 32)

    def train_batch(self, images: Tensor, step: Any) -> None:
        if step(self.distance, (view(images), view(images))).taken:
            with torch.no_grad():
                torch._foreach_lerp_([*self.target.parameters()], [*self.online.parameters()], 0.05)

    def distance(self, views: tuple[Tensor, Tensor]) -> Tensor:
        alike = [cosine_similarity(self.predictor(self.online(a)), self.target(b)) for a, b in (views, views[::-1])]
        return (4 - 2 * (alike[0] + alike[1])).mean()


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)


def data() -> DataLoader[Any]:
    return DataLoader(digits()[0][:1500], batch_size=64, shuffle=True, drop_last=True)


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": BYOL(), "train_data": data(), "optimizer": "adam(lr=1e-3)", "duration": "20ep", "seed": 1}
    return hocket.Trainer(**{**options, **changes})


def accuracy(network: nn.Module) -> float:
    """Classify held-out digits by the nearest neighbour in the features among 50 others, the only ones with labels."""
    images, labels = digits()
    features = network(images).flatten(1).detach()
    nearest = torch.cdist(features[1500:], features[:1500:30]).argmin(1)
    return float((labels[:1500:30][nearest] == labels[1500:]).float().mean())


if __name__ == "__main__":
    byol = BYOL()
    print(f"accuracy by pixels {accuracy(nn.Identity()):.1%}, by untrained features {accuracy(byol.online):.1%}")
    make_trainer(model=byol, loggers=["progress"]).fit()
    print(f"by trained features {accuracy(byol.cpu().online):.1%}")
