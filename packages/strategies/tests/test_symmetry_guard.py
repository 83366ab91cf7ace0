"""Ranks that do different things are told which one and who, at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_strategies.symmetry_guard import SymmetryGuard
from hocket_testkit import CallbackConformance, run_ranks
from hocket_testkit.ranks import RankError


class TestSymmetryGuard(CallbackConformance):
    def make(self) -> hocket.Callback:
        return SymmetryGuard()


class Diverges(hocket.Callback):
    """Does something on rank 1 only, in the third batch."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def batch_end(self, state: hocket.State) -> None:
        if state.strategy.rank == 1 and state.timestamp.batch == 3:
            self.what(state)


def train(*callbacks: hocket.Callback, guard: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(30, 4, generator=generator), torch.randn(30, 2, generator=generator))
    batches = DataLoader(samples, 3)
    torch.manual_seed(0)
    trainer = hocket.Trainer(
        model=nn.Linear(4, 2), loss=nn.functional.mse_loss, train_data=batches, eval_data=batches, duration="2ep",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), strategy="ddp", device="cpu",
        callbacks=[*(["symmetry-guard"] if guard else []), *callbacks],
    )  # fmt: skip
    trainer.fit()
    return trainer.model_state_dict()


def test_ranks_that_are_alike_are_left_alone() -> None:
    """And train as they would without it."""
    with_it = run_ranks(lambda rank: train(), 2)
    without = run_ranks(lambda rank: train(guard=False), 2)
    for rank in range(2):
        assert all(torch.equal(value, without[rank][name]) for name, value in with_it[rank].items())


@pytest.mark.parametrize(
    "what, said",
    [
        (lambda state: state.bus.all_reduce(torch.zeros(2, 3), "max"), r"all_reduce\('max'\) of float32\[2, 3\]"),
        (lambda state: state.bus.barrier(), "barrier"),
        (lambda state: state.bus.broadcast_object(1), "broadcast_object"),
        (lambda state: state.bus.all_gather_object(1), "all_gather_object"),
    ],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_collective_of_one_rank(what: Any, said: str, world_size: int) -> None:
    """Without the guard they would wait for each other, or reduce what does not belong together."""
    with pytest.raises(RankError, match=f"rank 1: {said}, called by callback 'diverges' in batch_end") as raised:
        run_ranks(lambda rank: train(Diverges(what)), world_size)
    assert "SymmetryError: Ranks diverged after" in str(raised.value)


def test_ranks_that_are_not_at_the_same_place() -> None:
    def ahead(state: hocket.State) -> None:
        state.timestamp.sample += 1

    with pytest.raises(RankError, match="rank 1: the end of batch 4 of epoch 0 with 25 samples") as raised:
        run_ranks(lambda rank: train(Diverges(ahead)), 2)
    assert "rank 0: the end of batch 4 of epoch 0 with 24 samples" in str(raised.value)
