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
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from hocket import Callback, State, Trainer
from hocket.data import seeded
from hocket.data.errors import DataError
from hocket_testkit import RankError, run_ranks
from hocket_testkit.compare import difference

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


class Stream(IterableDataset[Any]):
    """Says where it is, and begins anew when it ends."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < SAMPLES:
            self.place += 1
            yield torch.randn(6, generator=torch.Generator().manual_seed(self.place)), self.place % 3, self.place - 1
        self.place = 0

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state_dict: Any) -> None:
        self.place = state_dict["place"]


class Drawing(Sampler[int]):
    """Goes on drawing from the global random numbers, as models do."""

    def __iter__(self) -> Any:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(random.randrange(len(left)) if len(left) % 2 else int(torch.randint(len(left), ())))

    def __len__(self) -> int:
        return SAMPLES


class Watch(Callback):
    """The samples of every batch, those of one rank after those of another, its loss, and the Trainer's state after some."""

    def __init__(self, *at: int) -> None:
        self.at, self.trainer, self.over = at, None, None
        self.trees: dict[int, Any] = {}
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def batch_end(self, state: State) -> None:
        mine = state.batch[2].tolist() if state.rank_samples else []
        self.seen.append([index for each in state.bus.all_gather_object(mine) for index in each])
        self.losses.append(state.loss.item())

    def fit_end(self, state: State) -> None:
        self.over = copy.deepcopy(self.trainer.state_dict())

    def batch_checkpoint(self, state: State) -> None:
        if state.timestamp.batch in self.at:
            self.trees[state.timestamp.batch] = tree = copy.deepcopy(self.trainer.state_dict())
            if state.strategy.world_size > 1:  # of what ranks do not gather, they have the same
                assert len(tree["ranks"]) == state.strategy.world_size

    @property
    def tree(self) -> Any:
        """The only state that was taken."""
        (tree,) = self.trees.values()
        return tree


#: Batches of one's own, of which the ranks have one each; the last rank goes without in the end.
TWOS = [list(range(start, min(start + 2, SAMPLES - 2))) for start in range(0, SAMPLES - 2, 2)]


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
    at: int | tuple[int, ...] | None,
    *,
    seed: int,
    dropout: float = 0.0,
    strategy: Any = "auto",
    duration: str = "2ep",
    global_batch: int | None = BATCH,
    **loader: Any,
) -> tuple[Watch, dict[str, Any], dict[str, float]]:
    watch = Watch(*(at if isinstance(at, tuple) else () if at is None else (at,)))
    options: dict[str, Any] = {"shuffle": True, **loader}
    if options.keys() & {"sampler", "batch_sampler"}:
        options.pop("shuffle")
    kind = options.pop("loader", DataLoader)
    if options.pop("own_generator", False):
        options["generator"] = torch.Generator().manual_seed(6)
    trainer = Trainer(
        inputs=0,
        targets=1,  # batch[2] is for the callback
        model=Net(seed, dropout),
        loss=loss,
        train_data=kind(options.pop("dataset", None) or seeded(Noted()), **options),
        global_batch=global_batch,
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
        again = trainer.state_dict()
        for what in ("model", "optimizers", "schedules", "plugins"):
            # To the last bit, however many ranks have shards of it.
            assert (found := difference(again[what], tree[what], at=what)) is None, found
    metrics = dict(trainer.fit().metrics)
    assert tuple(watch.trees) == watch.at
    weights = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    trainer.close()
    watch.trainer = None
    return watch, weights, metrics


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.3},
        pytest.param({"dropout": 0.3, "own_generator": True, "num_workers": 2}, marks=pytest.mark.long),
        pytest.param({"dropout": 0.3, "num_workers": 2, "persistent_workers": True}, marks=pytest.mark.long),
        pytest.param({"dropout": 0.3, "dataset": Noted()}, marks=pytest.mark.long),
        {"dropout": 0.3, "sampler": Drawing()},
        pytest.param({"dropout": 0.3, "global_batch": None, "batch_size": 2}, marks=pytest.mark.long),
        {"dropout": 0.3, "global_batch": None, "batch_sampler": TWOS},
    ],
    ids=["global", "generator, workers", "persistent workers", "not seeded", "own sampler", "of ranks", "own batches"],
)
def test_two_ranks_go_on_to_the_last_bit(options: dict[str, Any]) -> None:
    def ranks(rank: int) -> None:
        whole, expected, metrics = train(None, None, seed=0, **options)
        first, *_ = train(None, (1, 4, 7, 9), seed=0, **options)
        for at, tree in first.trees.items():
            second, weights, again = train(tree, None, seed=9, **options)
            assert whole.seen == first.seen[:at] + second.seen
            assert whole.losses == first.losses[:at] + second.losses, at
            assert all(torch.equal(weights[name], expected[name]) for name in expected), at
            assert metrics == again

    run_ranks(ranks, 2, timeout=180)


@pytest.mark.filterwarnings("ignore:Every rank reads all:UserWarning")
@pytest.mark.parametrize("global_batch, last", [(BATCH, 7), pytest.param(None, 4, marks=pytest.mark.long)])
def test_streams_that_begin_anew_when_they_end_do_so_once(global_batch: int | None, last: int) -> None:
    def ranks(rank: int) -> None:
        options = {"shuffle": None, "batch_size": BATCH, "global_batch": global_batch, "dropout": 0.3}
        whole, expected, _ = train(None, None, seed=0, dataset=Stream(), **options)
        first, *_ = train(None, (2, last), seed=0, dataset=Stream(), **options)
        for at, tree in first.trees.items():
            second, weights, _ = train(tree, None, seed=9, dataset=Stream(), **options)
            assert whole.losses == first.losses[:at] + second.losses, at
            assert all(torch.equal(weights[name], expected[name]) for name in expected), at

    run_ranks(ranks, 2, timeout=180)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_a_state_of_their_own(workers: int) -> None:
    """torchdata's, over a map-style data set: 2 ranks and then 2, and then one."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    options = {"loader": stateful, "num_workers": workers, "own_generator": True}

    def ranks(rank: int) -> Any:
        whole, *_ = train(None, None, seed=0, **options)
        first, *_ = train(None, 4, seed=0, **options)
        second, *_ = train(first.tree, None, seed=9, **options)
        assert whole.seen == first.seen[:4] + second.seen
        assert whole.losses == first.losses[:4] + second.losses
        return first.tree, second.seen

    tree, seen = run_ranks(ranks, 2, timeout=180)[0]
    alone, *_ = train(tree, None, seed=9, **options)
    assert alone.seen == seen


WORKER = {"own_generator": True, "num_workers": 1}


@pytest.mark.parametrize(
    "strategies, options",
    [
        (("ddp", "ddp", "ddp"), {}),
        pytest.param(("fsdp", "fsdp", "fsdp"), {}, marks=pytest.mark.long),
        pytest.param(("ddp", "fsdp", "ddp"), WORKER, marks=pytest.mark.long),
        pytest.param(("fsdp", "ddp", "fsdp"), {}, marks=pytest.mark.long),
    ],
    ids=["ddp", "fsdp", "ddp, fsdp, ddp, with a generator and a worker", "fsdp, ddp, fsdp"],
)
def test_four_two_one_and_four_ranks_are_one_run(strategies: tuple[str, str, str], options: dict[str, Any]) -> None:
    """Each goes on in the middle of an epoch; together they do what one process does that nobody interrupts."""
    whole, expected, metrics = train(None, None, seed=0, strategy="single", **options)

    def part(ranks: int, strategy: str, tree: Any, at: int | None, seed: int) -> Any:
        return run_ranks(lambda rank: train(tree, at, seed=seed, strategy=strategy, **options), ranks, timeout=120)[0]

    four, *_ = part(4, strategies[0], None, 2, 0)
    two, *_ = part(2, strategies[1], four.tree, 5, 6)
    one, *_ = part(1, "single", two.tree, 9, 7)
    last, weights, again = part(4, strategies[2], one.tree, None, 8)
    seen = four.seen[:2] + two.seen[:3] + one.seen[:4] + last.seen
    assert seen == whole.seen
    assert sorted(chain(*seen[:7])) == sorted(chain(*seen[7:])) == list(range(SAMPLES))
    losses = four.losses[:2] + two.losses[:3] + one.losses[:4] + last.losses
    torch.testing.assert_close(losses, whole.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert metrics.keys() == again.keys()
    assert metrics["train/accuracy"] == pytest.approx(again["train/accuracy"])


@pytest.mark.filterwarnings("ignore:This run is configured differently")
def test_global_batches_of_another_size_are_refused_in_the_middle_of_an_epoch() -> None:
    """And continued at its end, or with what the message says."""

    def ranks(rank: int) -> Any:
        options = {"seed": 0, "strategy": "ddp", "global_batch": None, "batch_size": 2}
        return train(None, 3, **options)[0], train(None, None, duration="1ep", **options)[0].over

    middle, end = run_ranks(ranks, 2)[0]
    alone = {"seed": 1, "strategy": "single", "batch_size": 2}
    with pytest.raises(
        DataError, match=r"made of 4 samples; now it is made of 2 samples\. Pass global_batch=4 to the Trainer"
    ):
        train(middle.tree, None, global_batch=None, **alone)
    assert middle.seen[3:] == train(middle.tree, None, global_batch=4, **alone)[0].seen
    with pytest.warns(UserWarning, match="a global batch was 4 samples, is 2 samples; an epoch had 7 batches, has 14"):
        assert len(train(end, None, global_batch=None, **alone)[0].seen) == 14


@pytest.mark.filterwarnings("ignore:This run is configured differently")
@pytest.mark.parametrize(
    "before, after, message",
    [
        (
            {},
            {"strategy": "single"},
            r"of 2 batches; now it is made of 1 batches\. Start 2 ranks, without global_batch",
        ),
        ({"global_batch": 2}, {}, r"of 1 batches; now it is made of 2 batches\. Pass global_batch= with the number"),
    ],
)
def test_batches_that_cannot_be_set_are_refused_likewise(before: Any, after: Any, message: str) -> None:
    def part(tree: Any, at: int | None, **changes: Any) -> Any:
        options = {"global_batch": None, "batch_sampler": TWOS, "duration": "1ep", **changes}
        return run_ranks(
            lambda rank: train(tree, at, seed=0, **options), 1 if changes.get("strategy") == "single" else 2
        )[0]

    with pytest.raises(RankError, match=message):
        part(part(None, 3, **before)[0].tree, None, **after)


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
        options["global_batch"] = None
        whole, expected, _ = train(None, None, seed=0, **options)
        first, *_ = train(None, 9, seed=0, **options)
        second, weights, _ = train(first.tree, None, seed=5, **options)
        assert whole.seen == first.seen[:9] + second.seen
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        return first.tree

    tree = run_ranks(ranks, 2)[0]
    with pytest.raises(DataError, match="each with data of its own"):
        train(tree, None, seed=0, strategy="single")


@pytest.mark.parametrize("uneven", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_that_have_no_batches_left(uneven: bool) -> None:
    """A rank whose own data has ended keeps the others company, after a restart too."""

    def ranks(rank: int) -> None:
        lists = [[i] for i in range(SAMPLES)][: 3 if uneven and rank else 6]
        generator = torch.Generator().manual_seed(rank)
        batches = [(torch.randn(2, 6, generator=generator), torch.tensor([0, 2]), torch.tensor(i * 2)) for i in lists]
        options: dict[str, Any] = {
            "dataset": batches, "batch_size": None, "shuffle": False, "strategy": {"ddp": {"split_data": False}},
            "global_batch": None,
        }  # fmt: skip
        whole, expected, _ = train(None, None, seed=0, **options)
        first, *_ = train(None, (2, 3, 5, 8), seed=0, **options)
        for at, tree in first.trees.items():
            second, weights, _ = train(tree, None, seed=5, **options)
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
