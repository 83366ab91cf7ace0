"""A run that was stopped at any step and continued by another Trainer is the uninterrupted run, to the last bit."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from hocket import Callback, EvalSet, State, Trainer
from hocket.callbacks.early_stopping import EarlyStopping
from hocket.data import seeded
from hocket.data.feed import DataError
from hocket.loggers.memory import MemoryLogger

SAMPLES, BATCH = 18, 4  # five batches, the last one of two


def tensors(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


def net(seed: int, dropout: float = 0.3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


class At(Callback):
    """The Trainer's state after so many batches, or epochs, as if read from a file."""

    def __init__(self, batch: int | None = None, epoch: int | None = None) -> None:
        self._batch, self._epoch = batch, epoch
        self.trainer: Trainer | None = None
        self.tree: Any = None
        self.logged: dict[str, int] = {}

    def batch_checkpoint(self, state: State) -> None:
        if state.timestamp.batch == self._batch:
            self._take(state)

    def epoch_checkpoint(self, state: State) -> None:
        if state.timestamp.epoch == self._epoch:
            self._take(state)

    def _take(self, state: State) -> None:
        assert self.trainer is not None
        self.tree = through_a_file(self.trainer.state_dict())
        (logger,) = (voice.obj for voice in state.bus.voices if voice.kind == "loggers")
        self.logged = {name: len(values) for name, values in logger.metrics.items()}


def through_a_file(tree: Any) -> Any:
    """Read back by torch's unpickler of nothing but tensors and plain values."""
    only_plain(tree)
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def only_plain(tree: Any, where: str = "") -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            assert type(key) is str, where
            only_plain(value, f"{where}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            only_plain(value, f"{where}/{index}")
    else:
        assert tree is None or type(tree) in (bool, int, float, str, bytes, Tensor), (where, type(tree))


def comparable(trainer: Trainer) -> dict[str, Any]:
    """Weights, averages, optimizers, metrics, random numbers: what should be the same, clocks aside."""
    tree = trainer.state_dict()
    tree["ranks"] = [{**own, "data": None} for own in tree["ranks"]]
    names = (
        "model", "optimizers", "schedules", "plugins", "progress", "metrics", "microbatch", "epoch_length", "guard", "ranks",
        "fit", "requested",
    )  # fmt: skip
    times = {name: value for name, value in tree["timestamp"].items() if not name.endswith("seconds")}
    return {**{name: tree[name] for name in names}, "timestamp": times}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (where, one.keys() ^ other.keys())
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    elif not where.endswith("/sec"):  # a clock
        assert one == other or (one != one and other != other), (where, one, other)


def check(make: Callable[..., Trainer], stops: Any, **fit: Any) -> None:
    """Compare the uninterrupted run with the continuation of one that ended after each of ``stops``."""
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)
    whole = make(model=net(0), callbacks=[])
    whole.fit(**fit)
    expected, log = comparable(whole), logger_of(whole).metrics
    whole.close()
    for at in stops:
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        stopping = at if isinstance(at, At) else At(at)
        first = make(model=net(0), callbacks=[stopping])
        stopping.trainer = first
        first.fit(**fit)
        first.close()
        assert stopping.tree is not None, at
        torch.manual_seed(5)  # another process would have other random numbers
        random.seed(5)
        np.random.seed(5)
        second = make(model=net(9), callbacks=[])
        second.load_state_dict(stopping.tree)
        second.fit(**fit)
        got = comparable(second)
        second.close()
        before, after = logger_of(first).metrics, logger_of(second).metrics
        assert_same(expected, got, f"after {at}")
        joined = {
            name: before.get(name, [])[: stopping.logged.get(name, 0)] + after.get(name, []) for name in {*before, *after}
        }
        assert joined == log, f"after {at}"


def logger_of(trainer: Trainer) -> MemoryLogger:
    (logger,) = (voice.obj for voice in trainer.state.bus.voices if voice.kind == "loggers")
    assert isinstance(logger, MemoryLogger)
    return logger


def maker(data: Callable[[], Any], **options: Any) -> Callable[..., Trainer]:
    """Trainers that differ in their model and callbacks."""

    def make(model: nn.Module, callbacks: list[Any]) -> Trainer:
        arguments: dict[str, Any] = {
            "loss": nn.functional.cross_entropy,
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            "duration": "2ep",
            "seed": 3,
            "log_every": "2ba",
            "train_metrics": lambda: {"accuracy": MulticlassAccuracy(3)},
            **options,
        }
        return Trainer(
            model=model,
            train_data=data(),
            eval_data=arguments.pop("eval_data", lambda: None)(),
            callbacks=[*arguments.pop("callbacks", list)(), *callbacks],
            loggers=[MemoryLogger()],
            algorithms=arguments.pop("algorithms", list)(),
            **arguments,
        )

    return make


class Shuffled(Sampler[int]):
    """Draws from Python's global random numbers for every index, and from a generator of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.own = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.count))
        self.own.shuffle(left)
        while left:
            yield left.pop(random.randrange(len(left)))

    def __len__(self) -> int:
        return self.count


class Drawn(Sampler[int]):
    """Draws its whole order before it is asked for the first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def with_generator(**options: Any) -> DataLoader[Any]:
    return DataLoader(tensors(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def replacing() -> DataLoader[Any]:
    sampler = RandomSampler(tensors(), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2))
    return DataLoader(tensors(), BATCH, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(tensors(), BATCH, shuffle=True),
    "generator": with_generator,
    "in order": lambda: DataLoader(tensors(), BATCH),
    "drop_last": lambda: DataLoader(tensors(), BATCH, shuffle=True, drop_last=True),
    "own sampler": lambda: DataLoader(tensors(), BATCH, sampler=Shuffled(SAMPLES)),
    "own sampler, drawn at once": lambda: DataLoader(tensors(), BATCH, sampler=Drawn()),
    "own batch sampler": lambda: DataLoader(tensors(), batch_sampler=BatchSampler(Shuffled(SAMPLES), BATCH, False)),
    "list of batches": lambda: [tuple(b) for b in DataLoader(tensors(), BATCH)],
    "without batches": lambda: DataLoader(
        [tuple(b) for b in DataLoader(tensors(), BATCH)], batch_size=None, shuffle=True
    ),
    "with replacement": replacing,
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_step_of_every_kind_of_data(name: str) -> None:
    check(maker(LOADERS[name]), [*range(1, 9), At(epoch=1)])


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes(generator: bool, persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}

    def data() -> DataLoader[Any]:
        return with_generator(**options) if generator else DataLoader(tensors(), BATCH, shuffle=True, **options)

    check(maker(data, duration="3ep"), [2, 5, 7, At(epoch=1), At(epoch=2), 14])


def test_everything_at_once_at_every_step() -> None:
    def evaluated(seed: int) -> DataLoader[Any]:
        return DataLoader(tensors(10), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))

    def sets() -> dict[str, EvalSet]:
        return {"a": EvalSet(evaluated(1), every="2ba"), "b": EvalSet(evaluated(2), every="1ep")}

    make = maker(
        LOADERS["shuffle"],
        eval_data=sets,
        algorithms=lambda: [{"ema": {"half_life": "3ba"}}, {"sam": {"rho": 0.1, "interval": 2}}, "label-smoothing"],
        callbacks=lambda: [EarlyStopping("a/loss", patience=50), EarlyStopping("b/loss", patience=40)],
        schedule="cosine(warmup=0.3dur)",
        microbatch=2,
        clip_gradients=1.0,
    )
    check(make, [*range(1, 11), At(epoch=1), At(epoch=2)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions(precision: str) -> None:
    overflowing = {"fp16": {"init_scale": 2.0**40}} if precision == "fp16" else precision
    check(maker(LOADERS["generator"], precision=overflowing, schedule="cosine(warmup=0.3dur)"), [1, 3, 5, 8])
