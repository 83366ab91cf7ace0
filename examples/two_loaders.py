"""Semi-supervised learning from two loaders: three labelled digits of each kind, and a thousand without labels.

    python examples/two_loaders.py

Pseudo-labels after Lee (2013), for predictions above a threshold as in equation 2 of Sohn et al. (2020, arXiv:2001.07685):
a confident prediction is the label of its image. `Several` makes a batch of one of each loader, a dict; "cycle" begins the
short loader again until the long one has ended. The task defines what a sample is, and a microbatch: the same part of both.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.data import Several, split


class PseudoLabels(hocket.Task):
    def __init__(self, weight: float = 1.0, sure: float = 0.9) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.weight, self.sure = weight, sure

    def forward(self, batch: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: self.network(images) for name, (images, *_) in batch.items()}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        labelled, unlabelled = outputs["labelled"], outputs["unlabelled"]
        chance, guess = unlabelled.detach().softmax(1).max(1)
        guessed = (cross_entropy(unlabelled, guess, reduction="none") * (chance > self.sure)).mean()
        return {"labelled": cross_entropy(labelled, batch["labelled"][1]), "guessed": self.weight * guessed}

    def count(self, batch: dict[str, list[Tensor]]) -> int:
        return len(batch["labelled"][0])

    def split(self, batch: dict[str, list[Tensor]], size: int) -> list[Any]:
        times = len(batch["unlabelled"][0]) // self.count(batch)
        parts = split(batch["labelled"], size), split(batch["unlabelled"], size * times)
        return [{"labelled": one, "unlabelled": other} for one, other in zip(*parts, strict=True)]


def data(labelled: int = 30) -> Several:
    """Loaders whose batches have one labelled digit to four unlabelled ones."""
    images, labels = load_digits(return_X_y=True)
    inputs, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    few = TensorDataset(inputs[:labelled], classes[:labelled])  # sorted like 0, 1, …, 9, 0, 1, …
    many = TensorDataset(inputs[labelled:1400])
    loaders = {
        "labelled": DataLoader(few, 10, shuffle=True, drop_last=True),
        "unlabelled": DataLoader(many, 40, shuffle=True, drop_last=True),
    }
    return Several(loaders, "cycle")


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": PseudoLabels(), "train_data": data(), "optimizer": "adam(lr=3e-3)", "duration": "10ep"}
    return hocket.Trainer(**options | {"seed": 1} | changes)


if __name__ == "__main__":
    images, labels = (torch.tensor(each[1400:]) for each in load_digits(return_X_y=True))
    for name, weight in {"labels only": 0.0, "with pseudo-labels": 1.0}.items():
        torch.manual_seed(1)
        model = PseudoLabels(weight)
        make_trainer(model=model).fit()
        right = (model.network(images.float() / 16).argmax(1) == labels).float().mean()
        print(f"{name}: {right:.1%} of unseen digits are right")
