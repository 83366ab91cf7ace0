"""`microbatch="auto"`: as few microbatches as fit, before the first step, and nobody notices that they were looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.testkit import run_ranks
from hocket.testkit.ranks import RankError


class Limited(nn.Module):
    """Runs out of memory above so many samples, and does what it does to each sample alone."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.sizes: list[int] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError(f"{len(inputs)} samples")
        return self.head(inputs)


class Remembering(Limited):
    """Has buffers that move and draws random numbers besides."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(inputs)))


@pytest.fixture
def make(data) -> Any:
    def make(model: nn.Module, **changes: Any) -> hocket.Trainer:
        """Batches of 32, 32 and 20 samples."""
        arguments = {
            "model": model, "loss": F.cross_entropy, "train_data": data(), "global_batch": 32, "duration": "2ep", "seed": 3,
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01), "microbatch": "auto", "device": "cpu",
        }  # fmt: skip
        return hocket.Trainer(**{**arguments, **changes})

    return make


@pytest.mark.parametrize(
    "limit, size", [(2, 2), (5, 5), (7, 7), (13, 11), (15, 11), (16, 16), (31, 16), (32, 32), (100, 32)]
)
def test_as_few_as_fit_and_as_even(make, limit: int, size: int) -> None:
    """Weights, buffers and random numbers are bit for bit those of a run that was told the size."""
    found, told = make(Remembering(limit)), make(Remembering(limit), microbatch=size)
    found.fit()
    told.fit()
    assert found.state.microbatch == size
    assert limit >= 32 or any(each == limit + 1 for each in found.state.model.sizes), "one more did not fit"
    for name, value in found.model_state_dict().items():
        assert torch.equal(value, told.model_state_dict()[name]), name


def test_what_was_found_is_kept_for_the_next_run(make) -> None:
    first, second, other, third = (make(Limited(13)), make(Limited(13)), make(Remembering(7)), make(Limited(13)))
    first.fit("1ba")
    assert max(first.state.model.sizes) == 32, "it tried"
    assert list(json.loads(Path("runs/microbatch.json").read_text()).values()) == [11]
    second.fit("1ba")
    assert max(second.state.model.sizes) == 11, "it knew"
    other.fit("1ba")
    assert other.state.microbatch == 7, "of another model it knew nothing"
    Path("runs/microbatch.json").write_text("{not JSON")
    third.fit("1ba")
    assert third.state.microbatch == 11 and max(third.state.model.sizes) == 32


def test_not_even_one_sample(make) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Not even one sample fits on cpu"):
        make(Limited(0)).fit()


def test_memory_that_runs_out_later_halves_it(make) -> None:
    """The batch is computed again; the result is that of the whole batch."""
    trainer, told = make(Limited(32)), make(Limited(32), microbatch=None)
    trainer.fit("1ba")
    trainer.state.model.limit = 9
    with pytest.warns(UserWarning, match="Out of memory with 32 samples at once; going on with 16") as warned:
        trainer.fit()
    assert trainer.state.microbatch == 8 and len(warned) == 2
    told.fit()
    _close(trainer.model_state_dict(), told.model_state_dict())


def test_ranks_agree_on_the_smallest(make) -> None:
    """Each has another limit, and none waits for the other. Of its 16 samples four times five fit, so four times four do."""

    def rank_main(rank: int) -> Any:
        trainer = make(Limited(7 if rank else 5), strategy="ddp")
        trainer.fit()
        return trainer.state.microbatch, trainer.model_state_dict()

    alone = make(Limited(100))
    alone.fit()
    for microbatch, weights in run_ranks(rank_main, 2):
        assert microbatch == 4
        _close(weights, alone.model_state_dict())


def test_memory_that_runs_out_later_on_a_rank_stops_all(make) -> None:
    """The others may be in the middle of a collective, so nobody goes on with another size."""

    def rank_main(rank: int) -> None:
        trainer = make(Limited(32), strategy="ddp")
        trainer.fit("1ba")
        trainer.state.model.limit = 4 if rank else 32
        trainer.fit()

    with pytest.raises(RankError, match=r"on rank 1\. Start again with microbatch=8") as raised:
        run_ranks(rank_main, 2)
    assert raised.value.rank == 1


def _close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5)
