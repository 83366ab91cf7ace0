"""Runs of several ranks, continued by as many to the last bit, and by other numbers of ranks on the same global batches."""

from __future__ import annotations

import copy
import random
import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from hocket import Callback, State, Trainer
from hocket.data import seeded
from hocket.data.feed import DataError
from hocket.testkit import RankError, run_ranks

MulticlassAccuracy = pytest.importorskip("torchmetrics.classification").MulticlassAccuracy

SAMPLES, BATCH = 27, 4  # seven batches, the last one of three


class Noted(Dataset[Any]):
    """Samples that say which they are, with noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.1 * torch.randn(6), index % 3, index


class Drawing(Sampler[int]):
    """Goes on drawing from the global random numbers, as models do."""

    def __iter__(self) -> Any:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(random.randrange(len(left)) if len(left) % 2 else int(torch.randint(len(left), ())))

    def __len__(self) -> int:
        return SAMPLES


class Watch(Callback):
    """The samples and the loss of every batch, over all ranks; the Trainer's state after one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.trainer, self.tree = at, None, None
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def batch_end(self, state: State) -> None:
        mine = state.batch[2].tolist() if state.rank_samples else []
        self.seen.append(sorted(index for each in state.bus.all_gather_object(mine) for index in each))
        self.losses.append(state.loss.item())

    def batch_checkpoint(self, state: State) -> None:
        if state.timestamp.batch == self.at:
            self.tree = copy.deepcopy(self.trainer.state_dict())
            if state.strategy.world_size > 1:  # of what ranks do not gather, they have the same
                assert len(self.tree["ranks"]) == state.strategy.world_size


def loss(outputs: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(outputs, batch)


class Net(nn.Module):
    def __init__(self, seed: int, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs)


def train(
    tree: Any,
    at: int | None,
    *,
    seed: int,
    dropout: float = 0.0,
    strategy: Any = "auto",
    duration: str = "2ep",
    **loader: Any,
) -> tuple[Watch, dict[str, Any], dict[str, float]]:
    watch = Watch(at)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, **loader}
    if options.get("sampler") is not None:
        options.pop("shuffle")
    if options.pop("own_generator", False):
        options["generator"] = torch.Generator().manual_seed(6)
    trainer = Trainer(
        model=Net(seed, dropout),
        loss=loss,
        train_data=DataLoader(options.pop("dataset", None) or seeded(Noted()), **options),
        train_metrics=lambda: {"accuracy": MulticlassAccuracy(3)},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        schedule="cosine(warmup=0.3dur)",
        algorithms=[{"ema": {"half_life": "3ba"}}],
        duration=duration,
        callbacks=[watch],
        seed=3,
        strategy=strategy,
    )
    watch.trainer = trainer
    if tree is not None:
        trainer.load_state_dict(tree)
    metrics = dict(trainer.fit().metrics)
    weights = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    trainer.close()
    watch.trainer = None
    return watch, weights, metrics


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.3},
        {"dropout": 0.3, "own_generator": True, "num_workers": 2},
        {"dropout": 0.3, "num_workers": 2, "persistent_workers": True},
        {"dropout": 0.3, "dataset": Noted()},
        {"dropout": 0.3, "sampler": Drawing()},
    ],
    ids=["global", "generator, workers", "persistent workers", "not seeded", "own sampler"],
)
def test_two_ranks_go_on_to_the_last_bit(options: dict[str, Any]) -> None:
    def ranks(rank: int) -> None:
        whole, expected, metrics = train(None, None, seed=0, **options)
        for at in (1, 4, 7, 9):
            first, *_ = train(None, at, seed=0, **options)
            second, weights, again = train(first.tree, None, seed=9, **options)
            assert whole.seen == first.seen[:at] + second.seen
            assert whole.losses == first.losses[:at] + second.losses, at
            assert all(torch.equal(weights[name], expected[name]) for name in expected), at
            assert metrics == again

    run_ranks(ranks, 2, timeout=180)


@pytest.mark.parametrize("strategies", [("ddp", "ddp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
@pytest.mark.parametrize(
    "options", [{}, {"own_generator": True, "num_workers": 1}], ids=["global", "generator, worker"]
)
def test_other_numbers_of_ranks_see_the_same_global_batches(
    strategies: tuple[str, str], options: dict[str, Any]
) -> None:
    one, other = strategies
    whole, expected, metrics = run_ranks(lambda rank: train(None, None, seed=0, strategy=one, **options), 2)[0]

    def part(ranks: int, strategy: str, tree: Any, at: int | None, seed: int) -> Any:
        return run_ranks(
            lambda rank: train(tree, at, seed=seed, strategy=strategy if ranks > 1 else "single", **options),
            ranks,
            timeout=120,
        )[0]

    two, *_ = part(2, one, None, 3, 0)
    single, *_ = part(1, "single", two.tree, 5, 7)
    four, weights, again = part(4, other, single.tree, None, 8)
    seen = two.seen[:3] + single.seen[:2] + four.seen
    assert seen == whole.seen
    assert sorted(chain(*seen[:7])) == sorted(chain(*seen[7:])) == list(range(SAMPLES))
    losses = two.losses[:3] + single.losses[:2] + four.losses
    torch.testing.assert_close(losses, whole.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert metrics.keys() == again.keys()
    assert metrics["train/accuracy"] == pytest.approx(again["train/accuracy"])


def test_train_metrics_of_an_epoch_that_began_on_other_ranks() -> None:
    """What the two ranks had seen is added up by one."""
    _, _, metrics = run_ranks(lambda rank: train(None, None, seed=0, duration="1ep"), 2)[0]
    first, *_ = run_ranks(lambda rank: train(None, 5, seed=0, duration="1ep"), 2)[0]
    _, _, again = train(first.tree, None, seed=4, strategy="single", duration="1ep")
    assert metrics["train/accuracy"] == pytest.approx(again["train/accuracy"])


def test_data_that_is_each_ranks_own() -> None:
    def ranks(rank: int) -> Any:
        warnings.simplefilter("ignore")  # that the sampler is left in charge
        data = Noted()
        options = {"dataset": seeded(data), "sampler": DistributedSampler(data, 2, rank, seed=2), "batch_size": 2}
        whole, expected, _ = train(None, None, seed=0, **options)
        first, *_ = train(None, 9, seed=0, **options)
        second, weights, _ = train(first.tree, None, seed=5, **options)
        assert whole.seen == first.seen[:9] + second.seen
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        return first.tree

    tree = run_ranks(ranks, 2)[0]
    with pytest.raises(DataError, match="each with data of its own"):
        train(tree, None, seed=0, strategy="single")


@pytest.mark.parametrize("uneven", [False, True])
def test_ranks_that_have_no_batches_left(uneven: bool) -> None:
    """A rank whose own data has ended keeps the others company, after a restart too."""

    def ranks(rank: int) -> None:
        lists = [[i] for i in range(SAMPLES)][: 3 if uneven and rank else 6]
        generator = torch.Generator().manual_seed(rank)
        batches = [(torch.randn(2, 6, generator=generator), torch.tensor([0, 2]), torch.tensor(i * 2)) for i in lists]
        options: dict[str, Any] = {
            "dataset": batches, "batch_size": None, "shuffle": False, "strategy": {"ddp": {"split_data": False}},
        }  # fmt: skip
        whole, expected, _ = train(None, None, seed=0, **options)
        for at in (2, 3, 5, 8):
            first, *_ = train(None, at, seed=0, **options)
            second, weights, _ = train(first.tree, None, seed=5, **options)
            assert whole.losses == first.losses[:at] + second.losses, at
            assert all(torch.equal(weights[name], expected[name]) for name in expected), at

    run_ranks(ranks, 2)


def test_a_rank_that_fails_to_load_says_so() -> None:
    def ranks(rank: int) -> None:
        first, *_ = train(None, 2, seed=0)
        assert first.tree is not None
        first.tree["version"] = 99
        train(first.tree, None, seed=0)

    with pytest.raises(RankError, match="version 99"):
        run_ranks(ranks, 2)
