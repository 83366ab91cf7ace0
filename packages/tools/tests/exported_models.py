"""Small models and Trainers that the tests of exports share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hocket


class Net(nn.Module):
    """A ResNet block for the digits, with a max-pool that BlurPool replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        return self.head((features + self.block(features)).mean((2, 3)))


class UNet(nn.Module):
    """Two levels, with skips by concatenation, and one upsampling of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.low = nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.smooth = nn.ConvTranspose2d(16, 8, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        high = self.down(image).relu()
        middle = self.middle(nn.functional.max_pool2d(high, 2)).relu()
        low = self.low(nn.functional.max_pool2d(middle, 2)).relu()
        middle = torch.cat([self.smooth(low), middle], 1)
        return self.out(torch.cat([self.up(middle), high], 1))


class Heads(nn.Module):
    """Return a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.sizes = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.classes(x), "sizes": (self.sizes(x), self.sizes(x).exp())}


class HeadsTask(hocket.Task):
    """Normalise the inputs in the task, and not in its network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Heads()

    def forward(self, batch):
        return self.network((batch["x"] - 0.5) / 2)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs["logits"], batch["y"])


class Undecided(nn.Module):
    """Decide by values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:  # the line that an export names
            y = y * 2
        return y


def rows(samples: int = 8) -> list[dict[str, torch.Tensor]]:
    """Return two batches of 6 numbers and a class."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.rand(samples, 6, generator=generator), "y": torch.randint(3, (samples,), generator=generator)}
        for _ in range(2)
    ]


def pairs(samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `rows` as tuples."""
    return [(batch["x"], batch["y"]) for batch in rows(samples)]


def tokens(samples: int = 12, length: int = 20) -> dict[str, torch.Tensor]:
    """Return a batch of texts, padded on the right."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(64, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, length // 2 + 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def texts() -> list[dict[str, torch.Tensor]]:
    """Return four batches of `tokens`."""
    return [tokens()] * 4


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch of images and the classes of their pixels."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 3, 16, 16, generator=generator), torch.randint(4, (8, 16, 16), generator=generator))]


def language_task(peft: Any = None) -> hocket.Task:
    """Return a small GPT-2."""
    import transformers

    from hocket_nlp import HuggingFaceTask

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=48, bos_token_id=0, eos_token_id=0
    )
    task: hocket.Task = HuggingFaceTask(transformers.GPT2LMHeadModel(config), peft=peft)
    return task


def trainer_of(model: nn.Module, data: Any, **arguments: Any) -> hocket.Trainer:
    """Return a Trainer that trains and evaluates on the data."""
    given = {"optimizer": "adamw(lr=1e-2)", "device": "cpu", "duration": "1ep", "eval_data": data, "seed": 1}
    return hocket.Trainer(model, data, **{**given, **arguments})
