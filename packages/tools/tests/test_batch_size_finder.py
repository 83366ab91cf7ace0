"""The largest batch that fits. Memory is simulated: a model raises torch.OutOfMemoryError above some number of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import make_data, make_trainer
from torch import Tensor, nn

import hocket
import hocket_tools
from hocket_testkit import run_ranks
from hocket_testkit.ranks import RankError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Limited(nn.Module):
    """A device with memory for so many samples at once: forward fails above it, or, one sample earlier, backward."""

    def __init__(self, limit: int, backward: bool = False) -> None:
        super().__init__()
        self.limit, self.sizes, self.backward = limit, list[int](), backward
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError(f"{len(inputs)} samples")
        outputs: Tensor = self.head(inputs)
        if self.backward and len(inputs) == self.limit:
            outputs.register_hook(_fail)
        return outputs


def _fail(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("gradients")


def trainer(model: nn.Module, **changes: Any) -> hocket.Trainer:
    return make_trainer(model=model, train_data=make_data(batch_size=16), device="cpu", **changes)


@pytest.mark.parametrize(
    "limit, largest, microbatch", [(1, 1, 1), (5, 5, 4), (15, 15, 8), (16, 16, None), (37, 37, None)]
)
def test_doubling_then_bisecting(limit: int, largest: int, microbatch: int | None) -> None:
    model = Limited(limit)
    found = hocket_tools.tune(trainer(model), "batch_size", limit=1000)
    assert (found.largest, found.batch, found.microbatch, found.limited) == (largest, 16, microbatch, False)
    assert model.sizes == [], "the trial is forgotten"
    if microbatch is not None:
        assert f"microbatch: {microbatch}\n" in str(found)
        auto = trainer(Limited(limit), microbatch="auto")
        auto.fit("1ba")
        assert auto.state.microbatch == microbatch, "as microbatch='auto'"
    else:
        assert f"batch_size={largest} in the DataLoader" in str(found)


def test_memory_that_runs_out_in_backward() -> None:
    assert hocket_tools.tune(trainer(Limited(37, backward=True)), "batch_size", limit=1000).largest == 36


def test_the_sizes_that_are_tried() -> None:
    tried: list[tuple[str, int, int]] = []
    hocket_tools.tune(trainer(Limited(37)), "batch_size", limit=1000, progress=lambda *what: tried.append(what))
    assert [size for _, size, _ in tried] == [16, 32, 64, 48, 40, 36, 38, 37]


@pytest.mark.parametrize("limit, largest", [(20, 20), (7, 7)])
def test_a_limit(limit: int, largest: int) -> None:
    found = hocket_tools.tune(trainer(Limited(1000)), "batch_size", limit=limit)
    assert found.largest == largest and found.limited
    assert "larger batches were not tried" in str(found)


def test_an_epoch_is_the_limit_and_a_cpu_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="Where the memory of a CPU runs out, the system may end the process"):
        found = hocket_tools.tune(trainer(Limited(1000)), "batch_size")
    assert found.largest == 96 and found.limited, "6 batches of 16"


def test_not_even_one_sample() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Not even one sample fits on cpu"):
        hocket_tools.tune(trainer(Limited(0)), "batch_size", limit=64)


def test_other_errors_are_raised() -> None:
    class Broken(Limited):
        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        hocket_tools.tune(trainer(Broken(5)), "batch_size", limit=64)


def test_a_window_of_batches_is_tried_batch_by_batch() -> None:
    found = hocket_tools.tune(trainer(Limited(11), accumulate="2ba"), "batch_size", limit=64)
    assert (found.largest, found.batch, found.microbatch) == (11, 16, 8)


def test_two_ranks_agree_on_the_smallest() -> None:
    """Each has other memory, and none waits for the other."""
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> Any:
        run = make_trainer(model=Limited(23 if rank else 41), global_batch=16, strategy="ddp", seed=3, device="cpu")
        before = [each.clone() for each in run.state.model.parameters()]
        found = hocket_tools.tune(run, "batch_size", limit=1000)
        same = all(torch.equal(one, other) for one, other in zip(before, run.state.model.parameters(), strict=True))
        run.fit("2ba")
        return found.as_json(), str(found), same

    one, other = run_ranks(rank_main, 2)
    assert one == other
    found, text, same = one
    assert found == {"largest": 23, "batch": 8, "ranks": 2, "limited": False, "microbatch": None} and same
    assert "batch_size=23 in the DataLoader, or global_batch=46" in text


def test_one_rank_without_memory_ends_both() -> None:
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> None:
        run = make_trainer(model=Limited(0 if rank else 41), global_batch=16, strategy="ddp", device="cpu")
        hocket_tools.tune(run, "batch_size", limit=1000)

    with pytest.raises(RankError, match="Not even one sample fits"):
        run_ranks(rank_main, 2)
