"""What the suites train unless a plug-in's author says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.task import SupervisedTask, Task

CLASSES = 4


class TwoSteps(Task):
    """Trains two models on the same batches, each with an optimizer of its own, in a step of its own.

    Args:
        models: two modules, or tasks of one step.
        loss: the loss function of modules.
        optimizer: makes an optimizer of a list of parameters.
    """

    def __init__(
        self, models: tuple[nn.Module, nn.Module], loss: Any, optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        super().__init__()
        self.first, self.second = (each if isinstance(each, Task) else SupervisedTask(each, loss) for each in models)
        self._optimizer = optimizer

    def configure_optimizers(self) -> dict[str, Optimizer]:
        """One for each model."""
        parts = {"first": self.first, "second": self.second}
        return {name: self._optimizer(list(part.parameters())) for name, part in parts.items()}

    def forward(self, batch: Any) -> Any:
        """Outputs of the second model, for evaluation."""
        return self.second(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The second model's, for evaluation."""
        return self.second.loss(outputs, batch)

    def train_batch(self, batch: Any, step: Any) -> None:
        """A step of the first model, then two of the second."""
        step(self.loss_of_first, batch, "first")
        for _ in range(2):
            step(self.loss_of_second, batch, "second")

    def loss_of_first(self, batch: Any) -> Any:
        """The first model's."""
        return self.first.loss_of(batch)

    def loss_of_second(self, batch: Any) -> Any:
        """The second model's."""
        return self.second.loss_of(batch)


def convolutional_network() -> nn.Module:
    """Logits ``(N, 4)`` for images ``(N, 3, 16, 16)``, without anything that mixes samples or draws random numbers.

    It has what methods for images look for: a strided convolution and a pooling with 16 channels, a normalisation, a ReLU,
    a linear layer.
    """
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def batch_norm_network() -> nn.Module:
    """The same shapes with a batch norm and a layer norm, whose statistics and weights are delicate in few bits."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, CLASSES),
    )


def labelled_images(samples: int = 29, batch_size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of float32 images ``(N, 3, 16, 16)`` in [0, 1] and int64 labels ``(N,)``; the last batch is smaller.

    Each class is a pattern of its own under noise, so that a small network learns it in a few steps.
    """
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(CLASSES, 3, 16, 16, generator=generator)
    labels = torch.arange(samples) % CLASSES
    noise = torch.randn(samples, 3, 16, 16, generator=generator)
    images = (patterns[labels] + 0.1 * noise).clamp(0, 1)
    return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
