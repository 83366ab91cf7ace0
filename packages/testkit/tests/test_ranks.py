"""Forked ranks: results come back by rank, failures come back as errors, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hocket_testkit.ranks import RankError, run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_are_joined_and_answer_in_order(world_size):
    offset = 10

    def function(rank, factor):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        environment = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        return offset + factor * rank, total, environment, torch.get_num_threads()

    results = run_ranks(function, world_size, 2)
    sum_of_ranks = world_size * (world_size - 1) / 2
    for rank, (value, total, environment, threads) in enumerate(results):
        assert value == 10 + 2 * rank and total == sum_of_ranks and threads == 1
        assert environment == [str(rank), str(rank), str(world_size), str(world_size)]


def test_the_parent_is_as_before():
    before = (dict(os.environ), torch.get_num_threads(), dist.is_initialized())
    run_ranks(lambda rank: None, 2)
    assert (dict(os.environ), torch.get_num_threads(), dist.is_initialized()) == before


def test_the_parent_may_have_computed_with_threads():
    """A fork has none of its parent's threads; waiting for them would never end."""
    torch.randn(300, 300) @ torch.randn(300, 300)
    product = run_ranks(lambda rank: (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item(), 2)
    assert product == [300.0**3] * 2


def test_a_killed_rank_is_noticed_though_its_children_live():
    """As DataLoader workers do, for some seconds; they hold the same pipe to the parent."""

    def function(rank):
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_ranks(function, 1)
    assert time.monotonic() - begin < 15


def test_an_error_comes_back_with_its_traceback_and_ends_the_others():
    def function(rank):
        if rank == 1:
            raise LookupError("not here")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)Rank 1 of 2 raised:.*in function.*LookupError: not here") as error:
        run_ranks(function, 2)
    assert error.value.rank == 1
    assert time.monotonic() - begin < 30


def test_what_cannot_be_pickled_is_an_error_too():
    with pytest.raises(RankError, match="Rank 0 of 1 raised"):
        run_ranks(lambda rank: lambda: None, 1)


def test_a_rank_that_dies_is_noticed():
    def function(rank):
        if rank == 0:
            os._exit(1)
        time.sleep(60)

    with pytest.raises(RankError, match="Rank 0 of 2 died"):
        run_ranks(function, 2)


def test_a_collective_that_not_every_rank_calls_ends_at_the_timeout():
    def function(rank):
        if rank == 0:
            dist.barrier()
        time.sleep(60)

    with pytest.raises(RankError, match=r"Ranks \[0, 1\] of 2 did not end within 0\.5 s"):
        run_ranks(function, 2, timeout=0.5)


def test_ranks_can_have_workers_of_their_own():
    loader = DataLoader(torch.arange(4), 2, num_workers=1)
    assert run_ranks(lambda rank: [batch.tolist() for batch in loader], 2) == [[[0, 1], [2, 3]]] * 2


def test_it_needs_no_pytest():
    code = "import sys; sys.modules['pytest'] = None; import hocket_testkit.ranks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
