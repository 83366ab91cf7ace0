"""A run in which every algorithm has something to do: small images or texts, a model of many parts, few batches."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import plugins
from hocket.plugins import registry

Made = TypeVar("Made")

#: Settings for algorithms with required arguments, and for those whose defaults change nothing in a few small batches.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "alibi": lambda: {"max_sequence_length": 16},
    "batch-size-warmup": lambda: {"initial": 0.5, "warmup": "0.5dur"},
    "distillation": lambda: {"teacher": _seeded(lambda: Network(memory=False))},
    "ema": lambda: {"half_life": "1ba"},
    "factorize": lambda: {"min_features": 16, "min_channels": 16},
    "ghost-batchnorm": lambda: {"ghost_batch_size": 4},
    "gradient-clipping": lambda: {"kind": "norm", "threshold": 0.1},
    "gyro-dropout": lambda: {"p": 0.3, "sigma": 8, "tau": 2},
    "layer-freezing": lambda: {"start": "0.25dur"},
    "loss-spike-guard": lambda: {"threshold": 0.2, "window": 2, "warmup": 2, "every": 1, "limit": 100},
    "packing": lambda: {"length": 16},
    "selective-backprop": lambda: {"start": None, "stop": None, "interrupt": 0},
    "rope-scaling": lambda: {"factor": 4},
    "squeeze-excite": lambda: {"latent_channels": 4, "min_channels": 16},
    "seq-length-warmup": lambda: {"min_seq_length": 2, "step_size": 2, "warmup": "5ba"},
    "stochastic-depth": lambda: {"drop_rate": 0.5, "blocks": "Block"},
    "swa": lambda: {"start": "0.25dur", "update_interval": "1ba"},
    "progressive-resizing": lambda: {"delay_fraction": 0.2},
}
#: Arguments of the Trainer without which an algorithm does nothing.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "low-precision-groupnorm": {"precision": "bf16"},
    "low-precision-layernorm": {"precision": "bf16"},
}
#: Algorithms for models with rotary positions.
ROTARY = {"rope-scaling"}
CLASSES = 3
SAMPLES, BATCH = 24, 8
DURATION = "6ba"
# From the registry, so that an algorithm that is added to a package is tested without a change here.
NAMES = sorted(entry.name for entry in registry.entries("algorithms") if entry.dist.startswith("hocket-algorithms-"))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class Network(nn.Module):
    """Strided convolution and pooling, residual blocks, batch or group norm, layer norm, dropout; for images of any size.

    Without ``memory`` what it makes of a sample depends on nothing else, so that it does not matter which rank computes it.
    """

    def __init__(self, memory: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d if memory else lambda channels: nn.GroupNorm(4, channels)
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Block(16, norm), Block(16, norm))
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.hidden, self.layer_norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.2 if memory else 0.0)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.pool(self.norm(self.first(images)).relu()))
        hidden = self.layer_norm(self.hidden(self.second(features).relu().mean((2, 3))))
        return self.head(self.dropout(hidden.relu()))


def _seeded(make: Callable[[], Made]) -> Made:
    """Return ``make()``, with the same random numbers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def _images(memory: bool) -> dict[str, Any]:
    labels = torch.arange(SAMPLES) % CLASSES
    noise = _seeded(lambda: torch.rand(SAMPLES, 3, 16, 16))
    samples = TensorDataset(
        0.6 * torch.eye(CLASSES)[labels, :, None, None] + 0.4 * noise, labels
    )  # a colour for each class
    return {
        "model": _seeded(lambda: Network(memory)),
        "loss": F.cross_entropy,
        "train_data": DataLoader(samples, BATCH, shuffle=True),
        "eval_data": DataLoader(samples, 16),
    }


def _language_model(memory: bool, rotary: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    common = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    share = 0.1 if memory else 0.0
    if rotary:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        positions = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
        drop = {"hidden_dropout": share, "attention_dropout": share}
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(**sizes, **common, **drop, max_position_embeddings=16, rope_parameters=positions)
        )
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), share)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **common, **drop))


def _texts(memory: bool, rotary: bool) -> dict[str, Any]:
    samples: Any = [{"input_ids": each, "labels": each} for each in _seeded(lambda: torch.randint(32, (SAMPLES, 8)))]
    return {
        "model": _seeded(lambda: _language_model(memory, rotary)),
        "train_data": DataLoader(samples, BATCH, shuffle=True),
        "eval_data": DataLoader(samples, 16),
    }


@functools.cache
def is_text(name: str) -> bool:
    """Whether an algorithm is for language models."""
    return next(entry.dist for entry in registry.entries("algorithms") if entry.name == name).endswith("-nlp")


def make(*names: str, memory: bool | None = None, **changes: Any) -> hocket.Trainer:
    """A Trainer with these algorithms, on images or texts; ``algorithms=[]`` gives the same run without them.

    Args:
        memory: whether the model has batch norm and dropout; by default only if an algorithm finds nothing to do without.
    """
    if memory is None:
        memory = any(needs_memory(name) for name in names)
    text = any(is_text(name) for name in names)
    arguments = {
        **(_texts(memory, any(name in ROTARY for name in names)) if text else _images(memory)),
        "global_batch": BATCH,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "duration": DURATION,
        "algorithms": [{name: SETTINGS.get(name, dict)()} for name in names],
        "seed": 5,
        "device": "cpu",
        **{key: value for name in names for key, value in ARGUMENTS.get(name, {}).items()},
    }
    return hocket.Trainer(**{**arguments, **changes})


@functools.cache
def needs_memory(name: str) -> bool:
    """Whether an algorithm is for batch norm or dropout, and finds neither in the model without memory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(name, memory=False).close()
    return any(issubclass(each.category, hocket.NoEffectWarning) for each in caught)


def weights(trainer: hocket.Trainer) -> dict[str, Tensor]:
    """Return copies of the training weights and of the weights that evaluation uses."""
    used = {f"evaluated {name}": value for name, value in trainer.model_state_dict(evaluated=True).items()}
    trained = trainer.model_state_dict(evaluated=False)
    return {name: value.clone() for name, value in {**trained, **used}.items()}


@functools.cache
def alone(name: str) -> dict[str, Tensor]:
    """The weights of a plain run with one algorithm."""
    return trained(name)


def plain(name: str) -> dict[str, Tensor]:
    """The weights of the run that `alone` is, without the algorithm."""
    same_model = name if name in ROTARY else "alibi" if is_text(name) else "ema"
    return _plain(same_model, needs_memory(name), tuple(ARGUMENTS.get(name, {}).items()))


@functools.cache
def _plain(name: str, memory: bool, arguments: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    return trained(name, algorithms=[], memory=memory, **dict(arguments))


@functools.cache
def together(names: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights of a plain run with these algorithms, on a model with batch norm and dropout."""
    return trained(*names, memory=True)


def trained(*names: str, increments: Sequence[str] = (DURATION,), **changes: Any) -> dict[str, Tensor]:
    """The weights of a run; see `weights`."""
    trainer = make(*names, **changes)
    for increment in increments:
        trainer.fit(increment)
    trainer.close()
    return weights(trainer)


def different(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> list[str]:
    """The names of weights that differ by more than the tolerance."""
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [
        name
        for name, value in a.items()
        if not (torch.equal(value, b[name]) or (tolerance and torch.allclose(value, b[name], rtol=0, atol=tolerance)))
    ]


@functools.cache
def conflict(one: str, other: str) -> bool:
    """Whether two algorithms refuse each other, or have no kind of model in common."""
    if "no-op-model" in (one, other):  # it leaves nothing of the model for others
        return True
    classes = [plugins.get("algorithms", name) for name in (one, other)]
    return other in classes[0].conflicts or one in classes[1].conflicts or is_text(one) is not is_text(other)


def covering(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return few sets of at most ``size`` names such that every two that do not conflict are together in one of them."""
    left = {pair for pair in itertools.combinations(names, 2) if not conflict(*pair)}
    sets = []
    while left:
        chosen = list(min(left))
        while len(chosen) < size:
            free = [name for name in names if name not in chosen and not any(conflict(name, each) for each in chosen)]
            gains = {name: sum(tuple(sorted((name, each))) in left for each in chosen) for name in free}
            best = max(free, key=lambda name: gains[name], default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
        left -= set(itertools.combinations(sorted(chosen), 2))
        sets.append(tuple(sorted(chosen)))
    return sets
