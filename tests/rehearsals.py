"""Models and commands that tests of estimates run in another process, which imports this file."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.basics.launch_environment import WorkerError
from hocket_cli import main
from hocket_insight.memory.rehearsal import Rehearsal, Stage, rehearse

#: A model, the arguments that it needs, and a batch.
Case = tuple[Callable[[], nn.Module], dict[str, Any], Any]


def mlp(samples: int = 256) -> Case:
    def model() -> nn.Module:
        return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(256, 256), nn.GELU())])

    return model, {"loss": "mse_loss"}, (torch.randn(samples, 256), torch.randn(samples, 256))


def small() -> Case:
    """A batch so small that the peak is in the optimizer's step, where all gradients exist."""
    return mlp(8)


def linear() -> Case:
    """One bucket of DistributedDataParallel, of 650 elements."""
    return lambda: nn.Linear(64, 10), {"loss": "mse_loss"}, (torch.randn(32, 64), torch.randn(32, 10))


def resnet() -> Case:
    torchvision = pytest.importorskip("torchvision")
    batch = torch.randn(16, 3, 128, 128), torch.randint(10, (16,))
    return lambda: torchvision.models.resnet18(num_classes=10), {"loss": "cross_entropy"}, batch


def convolutions(*layers: nn.Module) -> Case:
    """A convolution of few channels, and what follows."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return model, {"loss": "cross_entropy"}, (torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))


def grouped() -> Case:
    return convolutions(nn.Conv2d(16, 64, 3, stride=2, groups=4), nn.ReLU(), nn.Conv2d(64, 32, 3, dilation=2))


def transposed() -> Case:
    return convolutions(nn.ConvTranspose2d(16, 10, 4, stride=2, padding=1))


def transposed_without_stride() -> Case:
    return convolutions(nn.ConvTranspose2d(16, 32, 3))


def gpt() -> Case:
    transformers = pytest.importorskip("transformers")
    nlp = pytest.importorskip("hocket_nlp")
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=128, vocab_size=1000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(1000, (8, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    return lambda: nlp.HuggingFaceTask(transformers.GPT2LMHeadModel(config)), {}, batch


def broken() -> Case:
    class Broken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).missing

    return lambda: Broken(64, 10), *linear()[1:]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if inputs.sum() > 0 else inputs * self.layer.bias


def gated() -> Case:
    return Gated, *mlp()[1:]


def estimated(case: str, ranks: int = 1, **given: Any) -> Rehearsal:
    model, arguments, batch = globals()[case]()

    def make(stage: Stage, others: dict[str, Any]) -> AbstractContextManager[hocket.Trainer]:
        made = stage.model(model)
        data = torch.utils.data.DataLoader([batch] * 4, batch_size=None)
        with stage.modes():
            return hocket.Trainer(made, data, device="cpu", **{**arguments, **given, **others})

    return rehearse(make, ranks)


def command(folder: Path, *words: str) -> tuple[int, str, str]:
    """The exit code of a command in a folder, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        return main(words), out.getvalue(), err.getvalue()


def mistake() -> str:
    """What the rehearsal of a model that raises says; a WorkerError itself does not go from one process to another."""
    with pytest.raises(WorkerError) as caught:
        estimated("broken", 2, optimizer="sgd(lr=0.1)", strategy="ddp")
    return str(caught.value)
