"""Knowledge distillation: a student of 600 weights learns what a trained teacher knows about handwritten digits.

    python examples/distillation.py

After Hinton, Vinyals and Dean (2015, arXiv:1503.02531), equation 1 and section 2: cross-entropy with the teacher's
probabilities at a high temperature T, times T², plus cross-entropy with the labels. The teacher is frozen, `train` leaves it
in evaluation mode, and the optimizer is that of the student. As a part of the task it is moved to the device, and saved.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hocket


class Distillation(hocket.Task):
    def __init__(self, student: nn.Module, teacher: nn.Module, temperature: float = 4.0) -> None:
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher.requires_grad_(False), temperature

    def train(self, mode: bool = True) -> Distillation:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.student(batch[0])

    def loss(self, outputs: Tensor, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        taught = (self.teacher(images) / self.temperature).softmax(1)
        soft = cross_entropy(outputs / self.temperature, taught) * self.temperature**2
        return {"soft": soft, "hard": cross_entropy(outputs, labels)}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def data(batch_size: int = 64) -> DataLoader[Any]:
    images, labels = load_digits(return_X_y=True)
    samples = torch.tensor(images[:1400] / 16, dtype=torch.float32), torch.tensor(labels[:1400])
    return DataLoader(TensorDataset(*samples), batch_size, shuffle=True, drop_last=True)


def trained(network: nn.Module) -> nn.Module:
    """Train a network on the labels alone."""
    options = {"loss": cross_entropy, "optimizer": "adam(lr=3e-3)", "duration": "10ep", "seed": 1}
    hocket.Trainer(network, data(), **options).fit()
    return network


def distillation() -> Distillation:
    """Return a student, and a teacher that has been trained on the labels."""
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))
    return Distillation(small(), trained(teacher))


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": distillation(), "optimizer": {"student": "adam(lr=3e-3)"}, "duration": "10ep", "seed": 1}
    return hocket.Trainer(**options | {"train_data": data()} | changes)


if __name__ == "__main__":
    test = [torch.tensor(each[1400:]) for each in load_digits(return_X_y=True)]
    torch.manual_seed(1)
    trainer = make_trainer()
    trainer.fit()
    both = trainer.state.model
    for name, network in {"teacher": both.teacher, "student": both.student, "untaught": trained(small())}.items():
        right = (network.eval()(test[0].float() / 16).argmax(1) == test[1]).float().mean()
        print(f"{name}: {right:.1%} of unseen digits are right")
