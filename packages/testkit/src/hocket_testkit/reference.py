"""The models and data that the suites train by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.state.task import SupervisedTask, Task

CLASSES = 4


class TwoSteps(Task):
    """Train two models on the same batches, each with its own optimizer and step.

    Args:
        models: two modules, or tasks of one step.
        loss: the loss function of modules.
        optimizer: makes an optimizer from a list of parameters.
    """

    def __init__(
        self, models: tuple[nn.Module, nn.Module], loss: Any, optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        super().__init__()
        self.first, self.second = (each if isinstance(each, Task) else SupervisedTask(each, loss) for each in models)
        self._optimizer = optimizer

    def configure_optimizers(self) -> dict[str, Optimizer]:
        """Return an optimizer for each model."""
        parts = {"first": self.first, "second": self.second}
        return {name: self._optimizer(list(part.parameters())) for name, part in parts.items()}

    def forward(self, batch: Any) -> Any:
        """Return the outputs of the second model, for evaluation."""
        return self.second(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the second model's loss, for evaluation."""
        return self.second.loss(outputs, batch)

    def train_batch(self, batch: Any, step: Any) -> None:
        """Take a step of the first model, then two of the second."""
        step(self.loss_of_first, batch, "first")
        for _ in range(2):
            step(self.loss_of_second, batch, "second")

    def loss_of_first(self, batch: Any) -> Any:
        """Return the first model's loss."""
        return self.first.loss_of(batch)

    def loss_of_second(self, batch: Any) -> Any:
        """Return the second model's loss."""
        return self.second.loss_of(batch)


def convolutional_network() -> nn.Module:
    """Return a model with logits ``(N, 4)`` for images ``(N, 3, 16, 16)`` that mixes no samples and draws no random numbers.

    It has the layers that methods for images act on: a strided convolution and a pooling with 16 channels, a normalisation, a
    ReLU, a linear layer.
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
    """Return a model of the same shapes with batch norm and layer norm, which are sensitive to low precision."""
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
    """Return batches of float32 images ``(N, 3, 16, 16)`` in [0, 1] and int64 labels ``(N,)``; the last batch is smaller.

    Each class is a distinct pattern plus noise, so that a small network learns it in a few steps.
    """
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(CLASSES, 3, 16, 16, generator=generator)
    labels = torch.arange(samples) % CLASSES
    noise = torch.randn(samples, 3, 16, 16, generator=generator)
    images = (patterns[labels] + 0.1 * noise).clamp(0, 1)
    return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
