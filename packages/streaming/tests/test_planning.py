"""Plans and simulations against the lists of samples that training uses, and against arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.errors import WrongValue
from hocket_streaming.order.sampler import GlobalOrder, RankSlice
from hocket_streaming.writing.planning import Network, Sized, plan

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from streaming_simulation import simulate, simulated

SIZES = [37, 50, 50, 11, 50, 43, 50, 50, 29, 50] * 6
DATA = Sized(SIZES, [each * 10 for each in SIZES], [each * 20 for each in SIZES], "data")
CHUNK_OF = np.repeat(np.arange(len(SIZES)), SIZES)


@pytest.mark.parametrize(("machines", "lanes", "window"), [(1, 4, 2), (2, 8, 2), (4, 8, 1), (3, 8, 2), (8, 4, 3)])
def test_machines_fetch_what_their_samples_need(machines: int, lanes: int, window: int) -> None:
    found = plan(DATA, machines=machines, global_batch=48, lanes=lanes, window=window, cache_limit=10**9, seed=3)
    order = GlobalOrder([DATA], 48, seed=3, lanes=lanes, window=window)
    gets = []
    for machine in range(machines):
        lists = list(RankSlice(order, machine, machines))
        gets.append(sorted({int(CHUNK_OF[sample]) for one in lists for sample in one}))
    sizes = [sum(DATA.fetched[chunk] for chunk in chunks) for chunks in gets]
    if lanes % machines == 0:
        assert (found.all.gets, found.all.bytes) == (sum(map(len, gets)), sum(sizes))
        assert found.machine == (len(gets[int(np.argmax(sizes))]), max(sizes))
    else:  # a lane that machines share is counted for all of them
        assert sum(sizes) <= found.all.bytes
    assert found.all.bytes <= (1 + (lanes + machines) / len(SIZES)) * found.bytes or lanes % machines
    assert found.cache == min(2 * found.lanes_of_machine * window * 1000, sum(DATA.kept))


def test_the_first_batch_after_a_restart() -> None:
    data = DATA
    found, (two, six) = simulate(
        data, 4, [2, 6], global_batch=48, lanes=8, window=2, network=Network(1000.0, 0.5, 4), seed=3
    )
    order = GlobalOrder([data], 48, seed=3, lanes=8, window=2)
    for machines, traffic in ((4, found.restart), (2, two.first)):
        needed = []
        for machine in range(machines):
            samples = next(RankSlice(order, machine, machines).after(len(order) // 2)[0])
            chunks = {int(CHUNK_OF[sample]) for sample in samples}
            needed.append((len(chunks), sum(data.fetched[chunk] for chunk in chunks)))
        assert traffic.bytes == max(size for _, size in needed) and tuple(traffic) in needed
    assert two.seconds == -(-two.first.gets // 4) * 0.5 + two.first.bytes / 1000
    assert two.extra < 0.01 < six.extra, "six machines share lanes of eight"


def test_quality_and_cache_are_the_formulas() -> None:
    found = plan(simulated(10**9, 10**6, 50), machines=5, global_batch=1000, lanes=50, window=4, cache_limit=10**6)
    assert (found.lanes, found.quality, found.cache) == (50, 1 + 1000 / 200, 2 * 10 * 4 * 10**6)
    assert not found.cache_suffices and found.all.bytes <= found.bytes * (1 + 55 / 1000)
    assert found.samples_per_second == 50_000 / (-(-found.machine.gets // 16) * 0.03 + found.machine.bytes / 1.25e9)


@pytest.mark.parametrize("wrong", [{"machines": 0}, {"window": 0}, {"global_batch": 0}, {"cache_limit": -1}])
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WrongValue):
        plan(DATA, **wrong)
