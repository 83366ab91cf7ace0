"""A training with everything in it that has to go on as if nothing had happened. Also a script: folder, devices, pause."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.data import seeded
from hocket_checkpoints.storage import format as formats
from hocket_insight.callbacks.early_stopping import EarlyStopping

SAMPLES, BATCH, EPOCHS = 38, 8, 3  # five batches an epoch, the last one of six


class Images(Dataset[Any]):
    """Small pictures of three classes; on request flipped and made noisy by chance."""

    def __init__(self, samples: int, augmented: bool) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.targets = torch.randint(3, (samples,), generator=generator)
        self.images = torch.randn(samples, 1, 8, 8, generator=generator) + self.targets.view(-1, 1, 1, 1)
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augmented:
            image = (image.flip(-1) if random.random() < 0.5 else image) + 0.1 * torch.randn(image.shape)
        return image, self.targets[index]


class Network(nn.Module):
    """Has buffers, draws random numbers, and has a convolution for BlurPool to replace."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.norm = nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
            self.dropout, self.head = nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.first(images)).relu().mean((-2, -1))
        return self.head(self.dropout(features))


def make(folder: Path | str, *more: hocket.Callback, **changes: Any) -> hocket.Trainer:
    """The training, which goes on from what the folder has."""
    policy = {"every": "1ba", "keep": 2, **changes.pop("policy", {})}
    shuffled = DataLoader(Images(9, False), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    arguments: dict[str, Any] = {
        "model": Network(),
        "loss": F.cross_entropy,
        "train_data": DataLoader(seeded(Images(SAMPLES, True)), BATCH, shuffle=True, num_workers=1),
        "eval_data": {
            "a": hocket.EvalSet(shuffled, every="4ba"),
            "b": hocket.EvalSet(DataLoader(Images(7, False), 4), every="2ep"),
        },
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "schedule": "cosine(warmup=0.2dur)",
        "global_batch": BATCH,
        "duration": f"{EPOCHS}ep",
        "algorithms": [
            {"blurpool": {"min_channels": 1}},
            {"colout": {"p_row": 0.2, "p_col": 0.2}},
            "label-smoothing",
            {"sam": {"rho": 0.05}},
            {"ema": {"half_life": "3ba"}},
        ],
        "callbacks": [EarlyStopping("a/loss", patience=90), EarlyStopping("b/loss", patience=80), *more],
        # The first three batches overflow; from then on the scale grows again.
        "precision": {"fp16": {"init_scale": 2.0**40, "backoff_factor": 2.0**-8, "growth_interval": 5}},
        "clip_gradients": 1.0,
        "seed": 7,
        "device": "cpu",
        "run_name": "run",
        "checkpoints": hocket.Checkpoints(folder, **policy),
        "resume": "auto",
    }
    return hocket.Trainer(**{**arguments, **changes})


def outcome(folder: Path | str) -> dict[str, Any]:
    """Everything in the newest checkpoint by path: weights, averages, optimizers, …, without clocks and identity."""
    store = hocket.Checkpoints(folder).store
    name = store.latest()
    assert name is not None and formats.verify(Path(folder) / name) == []
    found: dict[str, Any] = {"name": name}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict | list | tuple):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{path}/{key}")
        elif not path.endswith(("seconds", "/sec", "/run_id")):
            found[path] = node

    walk(store.read(name), "")
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where two outcomes are not the same to the last bit."""
    paths = [path for path in expected if path not in found or not _same(found[path], expected[path])]
    return paths + [path for path in found if path not in expected]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    return type(one) is type(other) and (one == other or (one != one and other != other))


class At(hocket.Callback):
    """Does something after so many batches."""

    def __init__(self, acts: dict[int, Callable[[], Any]]) -> None:
        self.acts = acts

    def batch_end(self, state: hocket.State) -> None:
        self.acts.get(state.timestamp.batch, lambda: None)()


class Pause(hocket.Callback):
    """Leaves time for signals, and says how far the run is."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def batch_end(self, state: hocket.State) -> None:
        if self.seconds and state.strategy.rank == 0:
            (Path(self.folder) / "batch").write_text(str(state.timestamp.batch))
            time.sleep(self.seconds)


if __name__ == "__main__":
    folder, devices, pause = sys.argv[1], int(sys.argv[2]) or None, float(sys.argv[3])
    make(f"{folder}/checkpoints", Pause(folder, pause), devices=devices, policy={"every": None}).fit()
