"""Several loaders on several ranks: the same choice and the same global batches, continued on other numbers of ranks."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hocket
from hocket.data import Several, count, seeded, split
from hocket.data.errors import DataError
from hocket_testkit import RankError, run_ranks
from hocket_testkit.compare import difference

SIZES = {"few": (10, 2), "many": (44, 4)}  # samples, and those of a batch
MODES = ("cycle", "shortest", "in turn", "weighted")


class Noted(Dataset[Any]):
    """Samples that say which they are, with noise."""

    def __init__(self, samples: int, first: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self.inputs, self.first = torch.randn(samples, 4, generator=generator), first

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.1 * torch.randn(4), index % 3, self.first + index


class Net(hocket.Task):
    """Two heads: the mean over the samples of each loader, with its number as the weight, is exact however they are divided."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout))
            self.heads = nn.ModuleDict({"few": nn.Linear(8, 3), "many": nn.Linear(8, 3)})

    def forward(self, batch: Any) -> Any:
        # Both heads on both, so that ddp sees all parameters in every step.
        return {
            name: self.heads[name](self.body(own[0])) + 0 * sum(p.sum() for p in self.heads.parameters())
            for name, own in batch.items()
        }

    def loss(self, outputs: Any, batch: Any) -> Any:
        losses = {name: nn.functional.cross_entropy(outputs[name], own[1]) for name, own in batch.items()}
        return sum(losses.values()) / len(losses)

    def count(self, batch: Any) -> Any:
        return count(next(iter(batch.values())))

    def split(self, batch: Any, size: int) -> Any:
        parts = -(-self.count(batch).samples // size)
        each = [split(own, -(-len(own[0]) // parts)) for own in batch.values()]
        return [dict(zip(batch, part, strict=True)) for part in zip(*each, strict=True)]


class Watch(hocket.Callback):
    """The samples of every global batch by loader, its loss, and the Trainer's state after some."""

    def __init__(self, *at: int) -> None:
        self.at, self.trainer = at, None
        self.trees: dict[int, Any] = {}
        self.seen: list[dict[str, list[int]]] = []
        self.losses: list[float] = []

    def batch_end(self, state: hocket.State) -> None:
        mine = {name: own[2].tolist() if state.rank_samples else [] for name, own in state.batch.items()}
        ranks = state.bus.all_gather_object(mine)
        assert all(each.keys() == mine.keys() for each in ranks), "ranks chose different loaders"
        self.seen.append({name: list(chain(*(each[name] for each in ranks))) for name in mine})
        self.losses.append(state.loss.item())

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.batch in self.at:
            self.trees[state.timestamp.batch] = copy.deepcopy(self.trainer.state_dict())


def train(
    mode: Any, tree: Any = None, at: Any = (), *, dropout: float = 0.0, global_batch: int | None = 4, loaders: Any = None,
    killed: Any = None,
    **options: Any,
) -> tuple[Watch, dict[str, Any]]:  # fmt: skip
    watch = Watch(*at)
    loaders = loaders or {
        name: DataLoader(seeded(Noted(samples, 100 * samples)), size, shuffle=True)
        for name, (samples, size) in SIZES.items()
    }
    weights = {"few": 1, "many": 2} if mode == "weighted" else None
    arguments = {"optimizer": "adamw(lr=0.01)", "duration": "2ep", "loggers": [], "device": "cpu", "seed": 3, **options}
    trainer = hocket.Trainer(
        model=Net(dropout), train_data=Several(loaders, mode, weights=weights), callbacks=[watch, killed or Kill()],
        global_batch=global_batch, **arguments,
    )  # fmt: skip
    watch.trainer = trainer
    if tree is not None:
        trainer.load_state_dict(tree)
    trainer.fit()
    weights = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    trainer.close()
    watch.trainer = None
    return watch, weights


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_are_one_and_continue_as_two_and_as_one(mode: str) -> None:
    """The global batches of one process; from within an epoch two ranks continue bitwise, and one with the same batches."""
    whole, expected = train(mode)
    per_epoch = len(whole.losses) // 2
    at = (1, per_epoch - 1, per_epoch, per_epoch + 2)

    def ranks(rank: int) -> Any:
        two, weights = train(mode, at=at, dropout=0.3)
        for batch, tree in two.trees.items():
            rest, again = train(mode, tree, dropout=0.3)
            assert rest.losses == two.losses[batch:] and rest.seen == two.seen[batch:]
            assert difference(again, weights) is None
        plain, weights = train(mode, at=at, microbatch=1)
        return plain, weights

    two, weights = run_ranks(ranks, 2, timeout=180)[0]
    assert two.seen == whole.seen
    torch.testing.assert_close(two.losses, whole.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    for batch, tree in two.trees.items():
        rest, weights = train(mode, tree)
        assert rest.seen == whole.seen[batch:]
        torch.testing.assert_close(rest.losses, whole.losses[batch:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class Kill(hocket.Callback):
    """Ends rank 1 at once, without a word, in the batch after so many."""

    def __init__(self, after: int | None = None) -> None:
        self.after = after

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch - 1 == self.after and state.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This run is configured differently")
@pytest.mark.parametrize(
    "mode", ["cycle", "weighted", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("shortest", "in turn"))]
)
def test_a_run_that_is_killed_continues_from_its_files(mode: str, tmp_path: Path) -> None:
    """Two ranks are killed, continue, are killed again, and one process ends the run as if it had been alone."""
    whole, expected = train(mode)
    length = len(whole.losses)

    def part(after: int | None) -> Any:
        checkpoints = hocket.Checkpoints(tmp_path, every="1ba", keep=2)
        return train(mode, killed=Kill(after), checkpoints=checkpoints, resume="auto")

    for after in (2, length - 3):
        with pytest.raises(RankError, match="killed by SIGKILL"):
            run_ranks(lambda rank, after=after: part(after), 2)
    last, weights = part(None)
    assert len(last.seen) == 3 and last.seen == whole.seen[-3:]
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_the_samples_of_an_epoch() -> None:
    """Without a global batch each rank has a batch of each loader; every sample once, and the shorter loader once more."""
    watch, _ = run_ranks(lambda rank: train("cycle", global_batch=None, duration="1ep"), 2)[0]
    few, many = ([batch[name] for batch in watch.seen] for name in SIZES)
    assert [len(each) for each in many] == [8] * 5 + [4] and sorted(chain(*many)) == list(range(4400, 4444))
    assert [len(each) for each in few] == [4, 4, 2] * 2
    assert sorted(chain(*few[:3])) == sorted(chain(*few[3:])) == list(range(1000, 1010)) and few[:3] != few[3:]


@pytest.mark.filterwarnings("ignore:This run is configured differently")
def test_more_or_fewer_ranks_without_a_global_batch_are_refused() -> None:
    two = run_ranks(lambda rank: train("cycle", at=(2,), global_batch=None)[0], 2)[0]
    with pytest.raises(DataError, match=r"Loader 'few': .* of 4 samples; now .* of 2 samples\. Pass global_batch=4"):
        train("cycle", two.trees[2], global_batch=None)
    rest, _ = train("cycle", two.trees[2], global_batch=4)
    assert rest.seen == two.seen[2:]


def test_a_rank_without_a_slice_of_one_loader_warns() -> None:
    """A last batch of one sample on two ranks: one of them has nothing of it."""

    def ranks(rank: int) -> Any:
        loaders = {"few": DataLoader(Noted(5, 0), 2), "many": DataLoader(Noted(6, 100), 2)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch, _ = train("cycle", loaders=loaders, duration="1ep", global_batch=2)
        return watch.seen, [str(each.message) for each in caught if "no slice" in str(each.message)]

    (seen, none), (_, warned) = run_ranks(ranks, 2)
    assert seen == [
        {"few": [0, 1], "many": [100, 101]},
        {"few": [2, 3], "many": [102, 103]},
        {"few": [4], "many": [104]},
    ]
    assert not none and len(warned) == 1 and "loader 'few'" in warned[0] and "drop_last" in warned[0]

    def dropped(rank: int) -> Any:
        loaders = {"few": DataLoader(Noted(5, 0), 2, drop_last=True), "many": DataLoader(Noted(6, 100), 2)}
        return train("cycle", loaders=loaders, duration="1ep", global_batch=2)[0].seen

    assert run_ranks(dropped, 2)[0][2] == {"few": [0, 1], "many": [104, 105]}


@pytest.mark.parametrize("mode", ["cycle", pytest.param("in turn", marks=pytest.mark.long)])
def test_each_ranks_own_data(mode: str) -> None:
    """Rank 0 has more of one loader than rank 1, which pads; continued by as many ranks, refused for others."""

    def ranks(rank: int) -> Any:
        warnings.simplefilter("ignore")

        def loaders() -> Any:
            few, many = Noted(6 - 2 * rank, 0), Noted(12, 100)
            return {
                "few": DataLoader(few, 2),
                "many": DataLoader(many, 2, sampler=DistributedSampler(many, 2, rank, shuffle=True, seed=2)),
            }

        options = {"global_batch": None, "strategy": {"ddp": {"split_data": False}}, "dropout": 0.3}
        whole, expected = train(mode, loaders=loaders(), at=(1, 3, 4), **options)
        for batch, tree in whole.trees.items():
            rest, weights = train(mode, tree, loaders=loaders(), **options)
            assert rest.seen == whole.seen[batch:] and difference(weights, expected) is None
        return whole.seen, whole.trees[1]

    seen, tree = run_ranks(ranks, 2, timeout=120)[0]
    assert len(seen) == 2 * (3 if mode == "cycle" else 6)
    with pytest.raises(DataError, match="each with data of its own"):
        train(mode, tree, global_batch=None)


def test_ranks_that_combine_loaders_differently_are_refused() -> None:
    def ranks(rank: int) -> Any:
        data = Several({"few": [0], "many": [1]}, "weighted", weights={"few": 1 + rank, "many": 1})
        hocket.Trainer(model=Net(0.0), train_data=data, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu")

    with pytest.raises(RankError, match=r"train_data: Several\(.*'few': 2.0.* instead of .*'few': 1.0"):
        run_ranks(ranks, 2)


@pytest.mark.filterwarnings("ignore:Every rank reads all")
def test_ranks_evaluate_every_sample_once() -> None:
    def evaluate(rank: int) -> float:
        loaders = {name: DataLoader(Noted(5 + 2 * number, 10 * number), 2) for number, name in enumerate(SIZES)}
        torch.manual_seed(0)  # the noise of samples is drawn in order
        data = Several({name: [*loader] for name, loader in loaders.items()}, "in turn")
        trainer = hocket.Trainer(model=Net(0.0), eval_data=data, device="cpu", loggers=[])
        return trainer.evaluate()["eval/loss"]

    assert run_ranks(evaluate, 2) == pytest.approx([evaluate(0)] * 2)
