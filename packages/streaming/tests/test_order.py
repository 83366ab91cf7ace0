"""The order of streams: every sample once, from any position, on any number of ranks, shuffled as documented."""

from __future__ import annotations

import heapq
from collections import Counter
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hocket.errors import WrongValue
from hocket_streaming import GlobalOrder, RankSlice
from hocket_streaming.order.lanes import Passes
from hocket_streaming.order.mixing import Mixing, Stage, divided


class Chunks:
    """A data set of which the sizes of its chunks are known."""

    def __init__(self, sizes, identity="a"):
        self.sizes, self.identity, self.asked = list(sizes), identity, []

    def ahead(self, chunks, at_once):
        self.asked.append(list(chunks))

    def chunk_of(self, sample):
        return int(np.searchsorted(np.cumsum(self.sizes), sample, "right"))


shapes = {
    "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=12),
    "batch": st.integers(1, 16),
    "lanes": st.integers(1, 8) | st.none(),
    "window": st.integers(1, 5),
}


@settings(max_examples=15, deadline=None)
@given(**shapes, epoch=st.integers(0, 3), drop_last=st.booleans(), shuffle=st.booleans(), seed=st.integers(0, 9))
def test_every_sample_once_and_the_same_from_any_position(sizes, batch, lanes, window, epoch, drop_last, shuffle, seed):
    def order():
        made = GlobalOrder(
            [Chunks(sizes)], batch, seed=seed, lanes=lanes, window=window, drop_last=drop_last, shuffle=shuffle
        )
        made.set_epoch(epoch)
        return made

    lists, samples = list(order()), sum(sizes)
    read = [sample for each in lists for sample in each]
    assert all(len(each) == batch for each in lists[:-1]) and len(lists) == len(order())
    assert len(read) == (samples - samples % batch if drop_last else samples) and len(set(read)) == len(read)
    assert set(read) <= set(range(samples)) and (shuffle or read == list(range(len(read))))
    for skip in range(len(lists) + 2):
        rest, done = order().after(skip)
        assert list(rest) == lists[skip:] and done == min(skip, len(lists))


@settings(max_examples=25, deadline=None)
@given(**shapes, ranks=st.integers(1, 4))
def test_ranks_have_parts_of_the_same_lists(sizes, batch, lanes, window, ranks):
    order = GlobalOrder([Chunks(sizes)], batch, seed=1, lanes=lanes, window=window)
    parts = [list(RankSlice(order, rank, ranks)) for rank in range(ranks)]
    assert [[*chain(*each)] for each in zip(*parts, strict=True)] == list(order)


def test_epochs_and_seeds_and_data_have_other_orders():
    def read(seed=1, epoch=0, identity="a"):
        order = GlobalOrder([Chunks([50] * 20, identity)], 20, seed=seed)
        order.set_epoch(epoch)
        return tuple(map(tuple, order))

    assert len({read(), read(seed=2), read(epoch=1), read(identity="b")}) == 4
    assert read() == read()


def test_without_a_seed_the_order_follows_that_of_torch():
    order = GlobalOrder([Chunks([5] * 8)], 4)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.rand(7)
        one = list(order)
        torch.manual_seed(4)
        other = list(order)
    assert one == list(GlobalOrder([Chunks([5] * 8)], 4, seed=3)) != other


def test_each_rank_reads_chunks_of_its_own():
    """Of 64 chunks two ranks share those at the edges of lanes alone; without lanes each would read all of them."""
    data = Chunks([32] * 64)
    order = GlobalOrder([data], 64, seed=1, lanes=8, window=2)
    read = [{data.chunk_of(sample) for part in RankSlice(order, rank, 4) for sample in part} for rank in range(4)]
    assert sum(map(len, read)) <= 64 + 8 and set.union(*read) == set(range(64))


def test_what_is_fetched_ahead_is_what_is_read_next():
    data = Chunks([16] * 64)
    order = GlobalOrder([data], 32, seed=1, lanes=8, window=2).of_rank(1, 2)
    lists = iter(order)
    for number in range(32):
        part = next(lists)[16:]
        assert {data.chunk_of(sample) for sample in part} <= set(data.asked[-1])
        if number == 0:
            assert len(data.asked[-1]) >= 16  # two blocks of two chunks of four lanes
    assert len(data.asked) < 32
    whole = {chunk for asked in data.asked for chunk in asked}
    assert len(whole) <= 32 + 8


@pytest.mark.parametrize(("batch", "lanes", "window"), [(64, 1, 4), (64, 1, 16), (256, 1, 16), (256, 8, 2)])
def test_sorted_classes_are_as_uneven_in_a_batch_as_the_formula_says(batch, lanes, window):
    """chi² per degree of freedom of the classes of a batch is about 1 + G / K with K = lanes × window open chunks of one class.

    Batches of a block of single-class chunks are drawn without replacement: the sum of variances, plus that of the classes
    of K chunks, gives the 1 + G / K in the limit of large blocks.
    """
    chunks, size, classes = 400, 500, 10
    order = GlobalOrder([Chunks([size] * chunks)], batch, seed=5, lanes=lanes, window=window)
    of_class = np.arange(chunks * size) * classes // (chunks * size)
    counts = np.array([np.bincount(of_class[each], minlength=classes) for each in order if len(each) == batch])
    expected = batch / classes
    ratio = float(((counts - expected) ** 2 / expected).sum(1).mean() / (classes - 1))
    assert ratio == pytest.approx(1 + batch / (lanes * window), rel=0.25)


def test_shuffled_data_is_as_even_as_a_full_shuffle():
    chunks, size, classes, batch = 200, 500, 10, 64
    order = GlobalOrder([Chunks([size] * chunks)], batch, seed=5, lanes=16, window=4)
    of_class = np.random.default_rng(0).integers(0, classes, chunks * size)
    counts = np.array([np.bincount(of_class[each], minlength=classes) for each in order if len(each) == batch])
    expected = batch * np.bincount(of_class) / (chunks * size)
    assert float(((counts - expected) ** 2 / expected).sum(1).mean() / (classes - 1)) <= 1.1


# --- mixtures


@given(weights=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any), samples=st.integers(0, 200))
def test_shares_are_those_of_a_queue_of_quotients(weights, samples):
    """Against the definition: sample k of weight w comes at (k + 1/2) / w, the first of equals first."""
    queue = [(Fraction(1, 2 * weight), number, 0) for number, weight in enumerate(weights) if weight]
    heapq.heapify(queue)
    counts = [0] * len(weights)
    for _ in range(samples):
        _, number, k = heapq.heappop(queue)
        counts[number] += 1
        heapq.heappush(queue, (Fraction(2 * k + 3, 2 * weights[number]), number, k + 1))
    assert list(divided(samples, weights)) == counts


def test_weights_change_where_their_stage_begins():
    mixing = Mixing([Stage(0, (Fraction(1), Fraction(0))), Stage(100, (Fraction(1), Fraction(3)))])
    assert [mixing.counts(at) for at in (0, 50, 100, 104, 500)] == [(0, 0), (50, 0), (100, 0), (101, 3), (200, 300)]


def test_repeats_are_read_so_often_in_an_epoch():
    web, code = Chunks([5] * 6, "web"), Chunks([4] * 5, "code")
    stages = [Stage(0, (Fraction(30), Fraction(60)))]
    order = GlobalOrder([web, code], 8, seed=1, mixing=Mixing(stages), samples=90, lanes=4, window=2)
    for epoch in range(2):
        order.set_epoch(epoch)
        times = Counter(sample for each in order for sample in each)
        assert {times[sample] for sample in range(30)} == {1} and {times[sample] for sample in range(30, 50)} == {3}
        for skip in (0, 3, 11, 12):
            assert list(order.after(skip)[0]) == list(order)[skip:]


def test_every_batch_has_its_share_of_each_data_set():
    order = GlobalOrder(
        [Chunks([50] * 10, "web"), Chunks([50] * 3, "code")], 40, seed=1, samples=2000, lanes=8,
        mixing=Mixing([Stage(0, (Fraction("0.7"), Fraction("0.3")))]),
    )  # fmt: skip
    assert {sum(sample < 500 for sample in each) for each in order} == {28}


# --- size and mistakes


def test_a_hundred_million_samples_are_ordered_at_once():
    order = GlobalOrder([Chunks([5000] * 20_000)], 256, seed=1, lanes=64, window=4)
    first = next(order.after(0)[0])
    late = next(order.after(350_000)[0])
    assert len(set(first)) == len(set(late)) == 256 and not set(first) & set(late)


def test_passes_keep_few_arrays():
    passes = Passes([10] * 50, 1, "a", 4, 2)
    for at in range(5):
        passes.between(at * 500, at * 500 + 8)
    assert len(passes._passes) <= 2 and len(passes._blocks) == 4


@pytest.mark.parametrize("name", ["batch_size", "lanes", "window", "samples"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_numbers_that_are_not_possible_are_named(name, value):
    arguments = {"batch_size": 4} | {name: value}
    with pytest.raises(WrongValue, match=f"{name}={value!r} is not a number"):
        GlobalOrder([Chunks([4])], **arguments)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_the_ranks(rank, ranks):
    with pytest.raises(WrongValue, match=f"rank={rank} of ranks={ranks} is not possible"):
        RankSlice(GlobalOrder([Chunks([4])], 4, seed=1), rank, ranks)


def test_ranks_of_a_loop_of_their_own_need_the_same_seed():
    with pytest.raises(WrongValue, match="seed=None may differ between ranks"):
        RankSlice(GlobalOrder([Chunks([4])], 4), 0, 2)
