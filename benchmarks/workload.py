"""What every contender trains: models, batches in memory, and the hand-written loop that they are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its batches and its loss; ``steps`` a repeat, of which the first ``warmup`` do not count.

    The time of a step is the median over ``block`` steps each: long enough for what happens every now and then, such as
    logging, and untouched by what else the machine does in between.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    steps: int
    warmup: int
    block: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    learning_rate: float = 0.01
    device: str = "cpu"
    precision: str = "fp32"  # or "bf16": autocast

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=self.learning_rate)


def mlp() -> nn.Module:
    """32-64-10."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def resnet18() -> nn.Module:
    """torchvision's, for 1,000 classes."""
    from torchvision.models import resnet18

    return resnet18()


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1 × 1, 3 × 3, 1 × 1, around which a shortcut goes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        layers: list[nn.Module] = []
        for a, b, kernel, step in sizes:
            layers += [nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.path = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Four times the width."""
        return F.relu(self.path(x) + self.shortcut(x))


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """He et al. 2015, with the stride in the 3 × 3 convolution as torchvision has it; 25.6 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not index else 1))
            channels = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class GPT(nn.Module):
    """A decoder-only transformer with pre-norm and learned positions; logits as ``(batch, length, vocabulary)``."""

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 256, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits."""
        hidden = self.layers(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        return self.head(hidden)


def gpt2(layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, length: int = 1024) -> nn.Module:
    """A GPT of GPT-2's size: 124 million parameters, embeddings and head tied."""
    model = GPT(layers, width, heads, vocabulary, length)
    model.head = nn.Linear(width, vocabulary, bias=False)
    model.head.weight = model.tokens.weight
    return model


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def images() -> Batch:
    """For ResNet-18."""
    return torch.randn(32, 3, 64, 64), torch.randint(1000, (32,))


def texts() -> Batch:
    """For the GPT."""
    return torch.randint(256, (8, 128)), torch.randint(256, (8, 128))


WORKLOADS = {
    "mlp": Workload(mlp, lambda: (torch.randn(16, 32), torch.randint(10, (16,))), steps=1100, warmup=100, block=100),
    # Its hand-written step takes about a millisecond.
    "wide mlp": Workload(
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)),
        lambda: (torch.randn(96, 256), torch.randint(10, (96,))),
        steps=4100,
        warmup=100,
        block=500,  # gradient-, optimizer- and activation-monitor measure one batch in 500
    ),
    "resnet18": Workload(resnet18, images, steps=7, warmup=1, block=1),
    # For benchmarks/gpu.py, and small versions of both to try it with.
    "resnet50": Workload(
        resnet50, lambda: (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))), steps=40, warmup=10, block=10
    ),
    "gpt2": Workload(
        gpt2,
        lambda: (torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))),
        steps=40,
        warmup=10,
        block=10,
        loss=next_token_loss,
    ),
    "resnet50, toy": Workload(
        lambda: resnet50((1, 1, 1, 1), 4),
        lambda: (torch.randn(4, 3, 32, 32), torch.randint(1000, (4,))),
        steps=4,
        warmup=1,
        block=1,
    ),
    "gpt2, toy": Workload(
        lambda: gpt2(1, 16, 2, 64, 8),
        lambda: (torch.randint(64, (2, 8)), torch.randint(64, (2, 8))),
        steps=4,
        warmup=1,
        block=1,
        loss=next_token_loss,
    ),
    "gpt": Workload(GPT, texts, steps=9, warmup=1, block=1, loss=next_token_loss),
}


class Stopwatch:
    """Batches from memory that time themselves: from one that is asked for to the next."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self._on_gpu = workload.device == "cuda"
        kept = [workload.batch() for _ in range(min(workload.steps, 5 if self._on_gpu else 50))]
        if self._on_gpu:
            kept = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in kept]
        self.batches = [kept[i % len(kept)] for i in range(workload.steps)]
        self.batch_size = len(kept[0][0])  # Composer asks
        self.warmup, self.block = workload.warmup, workload.block
        self._times: list[float] = []

    @property
    def seconds_per_step(self) -> float:
        """Over whole blocks; not every contender asks for more when it has them all."""
        return median(b - a for a, b in pairwise(self._times)) / self.block

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if index >= self.warmup and (index - self.warmup) % self.block == 0:
                if self._on_gpu:
                    torch.cuda.synchronize()
                self._times.append(time.perf_counter())
            yield batch


class InTurn(Stopwatch):
    """Batches from memory that time themselves, a block at a time, in turn with the hand-written loop.

    What slows the machine down for a second, then, slows down both. The hand-written loop takes half of a block's steps, so
    that what plug-ins do every so many seconds costs them little more than alone.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._workload, self._model = workload, workload.model()
        #: Seconds of a block: of the hand-written loop, and of the contender.
        self._blocks: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[Batch]:
        begin = raw = 0.0
        for index, batch in enumerate(self.batches):
            if index >= self.warmup and (index - self.warmup) % self.block == 0:
                now = time.perf_counter()
                if begin:
                    self._blocks.append((raw, now - begin))
                with torch.enable_grad():
                    raw_loop(self._workload, self.batches[: self.block // 2], model=self._model)
                begin = time.perf_counter()
                raw = (begin - now) * 2
            yield batch

    @property
    def seconds_per_step(self) -> float:
        """The median of the hand-written loop's blocks, times the median of the ratios."""
        return self.raw_seconds_per_step * median(own / raw for raw, own in self._blocks)

    @property
    def raw_seconds_per_step(self) -> float:
        """The same of the hand-written loop."""
        return median(raw for raw, _ in self._blocks) / self.block


def raw_loop(workload: Workload, batches: Any, microbatches: int = 1, model: nn.Module | None = None) -> None:
    """The loop that anyone would write."""
    if model is None:
        torch.manual_seed(0)
        model = workload.model()
    model, device = model.to(workload.device), torch.device(workload.device)
    model.train()
    autocast = torch.autocast(device.type, torch.bfloat16) if workload.precision == "bf16" else nullcontext()
    optimizer = workload.optimizer(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        if workload.device != "cpu":
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if microbatches == 1:
            with autocast:
                loss = workload.loss(model(inputs), targets)
            loss.backward()
        else:
            size = len(inputs) // microbatches
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                (workload.loss(model(x), y) * (len(x) / len(inputs))).backward()
        optimizer.step()
