"""Golden runs: exact arithmetic, and a checkpoint of each in ``checkpoints/`` that every later version must resume.

Inputs and targets are small integers. Weights are multiples of 1/128; the optimizer moves them by the signs of their gradients.
So no operation rounds, and every processor computes the same numbers. ``python tests/golden/write.py`` writes the missing
checkpoints and never overwrites an existing one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import hocket
from hocket_testkit.ranks import run_ranks

FOLDER = Path(__file__).parent / "checkpoints"
SAMPLES, BATCH = 16, 4
#: The checkpoint lies in the second epoch, after its first batch.
NAME = "ep1-ba5"


class Sign(torch.optim.Optimizer):
    """Moves each weight against the sign of the sum of the signs of its gradients."""

    def __init__(self, parameters: Any, lr: float = 2**-4) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["signs"] = torch.zeros(()), torch.zeros_like(parameter)
                state["step"] += 1
                state["signs"] += parameter.grad.sign()
                parameter -= group["lr"] * state["signs"].sign()


class Network(hocket.Task):
    """A linear map, and a counter that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2, bias=False), nn.Linear(4, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.arange(8.0).view(2, 4) - 3)
            self.second.weight.copy_(torch.arange(8.0).view(2, 4).flip(0) / 4)
            self.second.bias.fill_(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.asked = 0

    def forward(self, batch: Any) -> Tensor:
        self.asked += 1
        if self.training:
            self.seen += 1
        return self.first(batch[0]) + self.second(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs.float() - batch[1]).square().mean()

    def extra_state(self) -> Any:
        return {"asked": self.asked}

    def load_extra_state(self, state: Any) -> None:
        self.asked = state["asked"]


class Largest:
    """A metric: the largest output of a batch, with a state that goes into checkpoints."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = -1e9

    def update(self, outputs: Tensor, targets: Any) -> None:
        self.value = max(self.value, float(outputs.float().max()))

    def compute(self) -> float:
        return self.value

    def merge_state(self, others: Any) -> None:
        self.value = max(self.value, *(other.value for other in others))

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def samples() -> TensorDataset:
    inputs = torch.arange(4.0 * SAMPLES).view(SAMPLES, 4) % 5 - 2
    return TensorDataset(inputs, torch.arange(2.0 * SAMPLES).view(SAMPLES, 2) % 7 - 3)


class Stream(IterableDataset[Any]):
    """The samples in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter([samples()[index] for index in range(SAMPLES)])


class Position(IterableDataset[Any]):
    """The same, from a position that it knows."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES:
            self.at += 1
            yield samples()[self.at - 1]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def torchdata(data: Dataset[Any], **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, BATCH, **options)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), BATCH, shuffle=True, **options)


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(5), num_workers=1)


def with_replacement() -> DataLoader[Any]:
    return DataLoader(samples(), BATCH, sampler=RandomSampler(samples(), replacement=True))


def two_optimizers(model: nn.Module) -> Any:
    return [Sign(model.get_submodule(name).parameters(), 2**-power) for power, name in ((4, "first"), (5, "second"))]


#: Name -> number of ranks, and the Trainer's arguments that are not `make`'s own; functions without arguments are called.
RECIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {"callbacks": ["lr-monitor"]}),
    "ema": (
        1,
        {"algorithms": [{"ema": {"half_life": "1ba"}}], "eval_data": None, "eval_every": "1ep"},
    ),  # averages have too many bits to square
    "fp16": (1, {"precision": "fp16"}),
    "microbatches": (1, {"microbatch": 2, "clip_gradients": 1024.0}),
    "two-optimizers": (1, {"optimizer": two_optimizers}),
    "ddp": (2, {"strategy": "ddp", "global_batch": BATCH}),
    "fsdp": (2, {"strategy": "fsdp", "global_batch": BATCH}),
    "generator-and-worker": (1, {"train_data": with_generator}),
    "with-replacement": (1, {"train_data": with_replacement}),
    "list": (1, {"train_data": lambda: [tuple(batch) for batch in DataLoader(samples(), BATCH)]}),
    "stream": (1, {"train_data": lambda: DataLoader(Stream(), BATCH)}),
    "stream-with-position": (1, {"train_data": lambda: DataLoader(Position(), BATCH)}),
    "torchdata-map": (1, {"train_data": lambda: torchdata(samples(), shuffle=True)}),
    "torchdata-stream": (1, {"train_data": lambda: torchdata(Position(), num_workers=1)}),
}


def make(name: str, folder: Path, **changes: Any) -> hocket.Trainer:
    """A Trainer that writes into ``folder``."""
    torch.manual_seed(11)
    model, options = Network(), dict(RECIPES[name][1])
    if options.get("optimizer") is two_optimizers:
        options["optimizer"] = two_optimizers(model)
    options["train_data"] = options.pop("train_data", shuffled)()
    arguments = {
        "model": model, "optimizer": Sign, "duration": "2ep", "seed": 3, "device": "cpu", "run_name": "golden",
        "schedule": "step(step_size='3ba', gamma=0.5)", "eval_data": DataLoader(samples(), BATCH), "eval_every": "3ba",
        "train_metrics": {"largest": Largest()}, "log_every": "2ba", "loggers": ["memory"], "folder": folder,
        "checkpoints": hocket.Checkpoints(folder / "checkpoints", every="5ba", keep=None),
    }  # fmt: skip
    return hocket.Trainer(**{**arguments, **options, **changes})


def outcome(trainer: hocket.Trainer) -> dict[str, Any]:
    """What a run comes to, as JSON."""
    stamp = trainer.state.timestamp
    return {
        "model": {name: value.tolist() for name, value in trainer.model_state_dict().items()},
        "metrics": {name: value for name, value in trainer.state.metrics.items() if not name.startswith("time/")},
        "rates": [group["lr"] for optimizer in trainer.state.optimizers for group in optimizer.param_groups],
        "plugins": plain(trainer.state_dict()["plugins"]),
        "asked": trainer.state.task.asked,
        "counts": [stamp.epoch, stamp.batch, stamp.sample],
    }


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items()}
    return tree.tolist() if isinstance(tree, Tensor) else tree


def of_ranks(name: str, function: Callable[[], Any]) -> Any:
    """What ``function`` returns on rank 0."""
    world_size = RECIPES[name][0]
    return function() if world_size == 1 else run_ranks(lambda rank: function(), world_size, timeout=120)[0]


def write(name: str) -> None:
    """Write a recipe's checkpoint, and what the run came to."""
    with tempfile.TemporaryDirectory() as folder:

        def run() -> Any:
            trainer = make(name, Path(folder))
            trainer.fit()
            return outcome(trainer)

        expected = of_ranks(name, run)
        shutil.copytree(Path(folder) / "checkpoints" / NAME, FOLDER / name / NAME)
    (FOLDER / name / "outcome.json").write_text(json.dumps(expected, indent=1) + "\n")
