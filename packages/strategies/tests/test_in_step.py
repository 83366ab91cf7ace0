"""Ranks that shard a model and run different parts of it are told so, before wrong weights are saved."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hocket
from hocket_strategies import DDP, FSDP, TensorParallel
from hocket_strategies.symmetry_guard import SymmetryError
from hocket_testkit.ranks import run_ranks


class Experts(nn.Module):
    """``order(rank, call)`` are the experts that this rank runs, in order."""

    def __init__(self, order):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.order, self.calls = order, 0

    def forward(self, x):
        chosen = self.order(dist.get_rank() if dist.is_initialized() else 0, self.calls)
        self.calls += 1
        return self.head(sum(self.experts[each](x) for each in chosen))


def train(strategy, order, folder, **options):
    torch.manual_seed(0)
    data = [(torch.full((4, 4), float(n)), torch.tensor([0, 1, 2, 0])) for n in range(4)]
    arguments = {"optimizer": "sgd(lr=0.1)", **options}
    trainer = hocket.Trainer(
        model=Experts(order), loss=F.cross_entropy, train_data=data, duration="1ep", strategy=strategy, device="cpu",
        folder=folder, **arguments,
    )  # fmt: skip
    try:
        trainer.fit()
    except (SymmetryError, TypeError) as error:
        return type(error).__name__, str(error), trainer.state.timestamp.batch
    return trainer.model_state_dict()


CASES = {
    "one each": (
        lambda rank, call: [rank],
        {},
        r"run different.*rank 0: network.experts.0; rank 1: network.experts.1",
        0,
    ),
    "one more": (lambda rank, call: [0, 1][: rank + 1], {}, "rank 0: nothing more; rank 1: network.experts.1", 0),
    "later": (lambda rank, call: [0, 1] if call < 2 or rank else [1, 0], {}, "in another order", 3),
    "one unit": (lambda rank, call: [rank], {"wrap": None}, "gradients of.*rank 0: network.experts.0.bias", 1),
}


def test_different_units_are_refused_by_name(tmp_path):
    def rank_main(rank):
        return {
            name: train(FSDP(split_data=False, **options), order, tmp_path)
            for name, (order, options, *_) in CASES.items()
        }

    for found in run_ranks(rank_main, 2):
        for name, (_, _, said, batch) in CASES.items():
            kind, text, at = found[name]
            assert kind == "SymmetryError" and re.search(said, text), (name, text)
            assert "find_unused_parameters" in text and at == batch, (name, at)


def test_units_that_no_rank_runs_are_fine(tmp_path):
    """An expert that everybody skips, in some batches or in all: as one process does, which has no gradient for it either."""

    def order(rank, call):
        return [call % 2] if call else [0]

    def rank_main(strategy):
        return train(strategy(split_data=False), order, tmp_path, optimizer="adamw(lr=0.1)")

    ddp = partial(DDP, find_unused_parameters=True)
    sharded_ranks, whole_ranks = (run_ranks(lambda rank: rank_main(each), 2) for each in (FSDP, ddp))  # noqa: B023
    for sharded, whole in zip(sharded_ranks, whole_ranks, strict=True):
        for name, value in whole.items():
            torch.testing.assert_close(sharded[name], value)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="Adafactor steps there")
def test_an_optimizer_that_cannot_step_on_shards_says_what_to_do(tmp_path):
    def rank_main(rank):
        optimizer = {"optimizer": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01)}
        return train(FSDP(split_data=False), lambda rank, call: [0, 1], tmp_path, **optimizer)

    for kind, text, _ in run_ranks(rank_main, 2):
        assert (
            kind == "WrongType" and "Adafactor cannot step on sharded parameters" in text and "strategy='ddp'" in text
        )


@pytest.mark.long
def test_two_meshes_in_one_process(tmp_path):
    """One after the other, each in a process group that the strategy itself has joined."""
    plan = {"experts.*": "colwise", "head": "rowwise"}
    order = lambda rank, call: [0, 1]  # noqa: E731

    def both():
        return [
            train(TensorParallel(tensor=2, plan=plan, split_data=False, **sizes), order, tmp_path)
            for sizes in ({"shard": 2}, {"replicate": 2})
        ]

    for first, second in hocket.launch(both, 4, timeout=120):
        for name, value in first.items():
            torch.testing.assert_close(second[name], value)
