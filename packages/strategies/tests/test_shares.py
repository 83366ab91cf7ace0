"""Every sample of a global batch goes to one rank, once, in every kind of data that a user may bring."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hocket.data.batches import Padding
from hocket.data.feed import Feed
from hocket.devices.cpu import CPU
from hocket.testkit.ranks import RankError, run_ranks
from hocket_strategies import DDP
from hocket_strategies.shares import share


@given(samples=st.integers(0, 200), world_size=st.integers(1, 17))
def test_shares_are_contiguous_and_even(samples, world_size):
    shares = [share(samples, rank, world_size) for rank in range(world_size)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(samples))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


class Numbers(Dataset):
    """Sample i is the number i; remembers what was loaded."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor(index)


try:
    import numpy
except ModuleNotFoundError:  # torch and hocket do without
    numpy = None


def joined_ranks(**options) -> DDP:
    strategy = DDP(**options)
    strategy.setup_environment(CPU())
    return strategy


def passes(make, world_size=2, train=True, epochs=1, **options):
    """By rank and pass, the batches of the data that ``make(rank)`` returns: lists, and ``("padding", list)``."""

    def rank_main(rank):
        torch.manual_seed(100 + rank)  # ranks differ, as they do under a Trainer
        random.seed(100 + rank)
        if numpy is not None:
            numpy.random.seed(100 + rank)
        strategy = joined_ranks(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = strategy.prepare_data(make(rank), train)
        return [
            [("padding", b.batch.tolist()) if isinstance(b, Padding) else b.tolist() for b in data]
            for _ in range(epochs)
        ]

    return run_ranks(rank_main, world_size)


def joined(by_rank, epoch=0):
    """The global batches of a pass: what ranks have at the same place, without padding."""
    return [
        [i for part in parts if part and part[0] != "padding" for i in part]
        for parts in itertools.zip_longest(*(rank[epoch] for rank in by_rank))
    ]


# --- DataLoaders over map-style data sets


def test_each_rank_gets_its_slice_of_every_batch():
    assert passes(lambda rank: DataLoader(Numbers(9), batch_size=4)) == [
        [[[0, 1], [4, 5], [8]]],
        [[[2, 3], [6, 7], ("padding", [8])]],
    ]


def test_evaluation_leaves_out_batches_without_a_share():
    assert passes(lambda rank: DataLoader(Numbers(9), batch_size=4), train=False) == [
        [[[0, 1], [4, 5], [8]]],
        [[[2, 3], [6, 7]]],
    ]


def test_a_rank_loads_only_its_share():
    def rank_main(rank):
        strategy = joined_ranks()
        numbers = Numbers(10)
        list(strategy.prepare_data(DataLoader(numbers, batch_size=4), True))
        return numbers.loaded

    assert run_ranks(rank_main, 2) == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(
    "samples, batch_size, drop_last", [(10, 4, False), (10, 4, True), (3, 3, False), (5, 2, False)]
)
@pytest.mark.parametrize("train", [True, False])
def test_the_length_is_the_number_of_batches(world_size, samples, batch_size, drop_last, train):
    def rank_main(rank):
        strategy = joined_ranks()
        data = strategy.prepare_data(DataLoader(Numbers(samples), batch_size, drop_last=drop_last), train)
        return len(data), len(list(data))

    lengths = run_ranks(rank_main, world_size)
    assert all(said == counted for said, counted in lengths)
    if train:
        assert len(set(lengths)) == 1


class UsesPython(Sampler):
    """Draws from Python's and NumPy's global generators, while it is iterated."""

    def __iter__(self):
        for block in range(3):
            yield from random.sample(range(4 * block, 4 * block + 4), 4)
        yield from (12 + numpy.random.permutation(4)).tolist() if numpy else random.sample(range(12, 16), 4)

    def __len__(self):
        return 16


SHUFFLED = {
    "shuffle": lambda rank: DataLoader(Numbers(16), 4, shuffle=True),
    "own generators": lambda rank: DataLoader(
        Numbers(16), 4, shuffle=True, generator=torch.Generator().manual_seed(rank)
    ),
    "subset": lambda rank: DataLoader(Numbers(16), 4, sampler=SubsetRandomSampler(range(16))),
    "python and numpy": lambda rank: DataLoader(Numbers(16), 4, sampler=UsesPython()),
    "batch sampler": lambda rank: DataLoader(
        Numbers(16), batch_sampler=BatchSampler(RandomSampler(range(16)), 4, drop_last=False)
    ),
    "two workers": lambda rank: DataLoader(Numbers(16), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "batches as samples": lambda rank: DataLoader(torch.arange(16).view(4, 4), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_ranks_shuffle_alike(kind):
    by_rank = passes(SHUFFLED[kind], world_size=3, epochs=2)
    for epoch in range(2):
        assert sorted(itertools.chain(*joined(by_rank, epoch))) == list(range(16))
    assert joined(by_rank, 0) != joined(by_rank, 1)


def test_samples_drawn_with_replacement_are_the_same_on_every_rank():
    def weighted(rank):
        return DataLoader(Numbers(16), 4, sampler=WeightedRandomSampler(torch.arange(16.0), 8))

    torch.manual_seed(100)
    assert joined(passes(weighted)) == [batch.tolist() for batch in weighted(0)]


@pytest.mark.parametrize("kind", ["shuffle", "own generators", "subset", "batch sampler", "batches as samples"])
def test_the_global_batches_are_those_of_one_process(kind):
    """Rank 0's random numbers decide, and it draws them as if it were alone."""
    torch.manual_seed(100)
    loader = SHUFFLED[kind](0)
    alone = [[batch.tolist() for batch in loader] for _ in range(2)]
    by_rank = passes(SHUFFLED[kind], world_size=2, epochs=2)
    assert [joined(by_rank, 0), joined(by_rank, 1)] == alone


def test_other_ranks_keep_their_random_numbers():
    def rank_main(rank):
        torch.manual_seed(rank)
        random.seed(rank)
        strategy = joined_ranks()
        list(strategy.prepare_data(DataLoader(Numbers(8), 4, sampler=UsesPython()), False))
        return random.random()

    random.seed(1)
    assert run_ranks(rank_main, 2)[1] == random.random()


def test_workers_of_different_ranks_draw_different_numbers():
    class Noise(Numbers):
        def __getitem__(self, index):
            return torch.rand(())

    def noise(rank):
        return DataLoader(Noise(8), 8, num_workers=1, generator=torch.Generator().manual_seed(0))

    ((first,),), ((second,),) = passes(noise)
    assert not set(first) & set(second)


def test_the_loader_keeps_its_options_and_the_users_own_is_untouched():
    def rank_main(rank):
        strategy = joined_ranks()
        loader = DataLoader(Numbers(8), 4, collate_fn=lambda items: ("collated", len(items)), drop_last=True)
        batches = list(strategy.prepare_data(loader, True))
        return batches, list(loader)

    assert run_ranks(rank_main, 2)[0] == ([("collated", 2)] * 2, [("collated", 4)] * 2)


def test_plug_ins_find_the_loader_that_is_read_from():
    """Per-sample transforms stand in for its data set while a fit lasts; the user's own loader does not notice."""

    def rank_main(rank):
        loader = DataLoader(Numbers(8), 4)
        prepared = joined_ranks().prepare_data(loader, True)
        vars(prepared.loader)["dataset"] = range(100, 108)
        return [batch.tolist() for batch in prepared], [batch.tolist() for batch in loader]

    assert run_ranks(rank_main, 2) == [
        ([[100, 101], [104, 105]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[102, 103], [106, 107]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ]


def test_a_feed_can_end_a_pass_with_persistent_workers_and_begin_another():
    def rank_main(rank):
        strategy = joined_ranks()
        loader = DataLoader(Numbers(12), 4, num_workers=1, persistent_workers=True)
        feed = Feed(strategy.prepare_data(loader, True))
        seen = []
        for _ in range(2):
            feed.start(0)
            seen.append(feed.next()[0].tolist())
            feed.close()
        return feed.length, seen

    assert run_ranks(rank_main, 2) == [(3, [[0, 1]] * 2), (3, [[2, 3]] * 2)]


def test_samplers_are_told_the_epoch():
    class Told(Sampler):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 4)

        def __len__(self):
            return 4

    def rank_main(rank):
        strategy = joined_ranks()
        feed = Feed(strategy.prepare_data(DataLoader(Numbers(8), 4, sampler=Told()), True))
        feed.start(7)
        return feed.next()[0].tolist()

    assert run_ranks(rank_main, 2) == [[7, 7], [7, 7]]


# --- anything else


def test_other_iterables_are_sliced():
    def batches(rank):
        return [torch.arange(4), torch.arange(4, 9), torch.tensor([9])]

    assert passes(batches) == [
        [[[0, 1], [4, 5, 6], [9]]],
        [[[2, 3], [7, 8], ("padding", [9])]],
    ]
    assert passes(batches, train=False)[1] == [[[2, 3], [7, 8]]]


def warned_of(make, times=1):
    """What each rank warns of while it prepares ``make(rank)``."""

    def rank_main(rank):
        strategy = joined_ranks()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                strategy.prepare_data(make(rank), False)
        return [str(warning.message) for warning in caught]

    return run_ranks(rank_main, 2)


def test_that_everything_is_read_everywhere_is_said_once():
    (message,), nothing = warned_of(lambda rank: [torch.arange(4)], times=2)
    assert message.startswith("Every rank reads all of the list") and "split_data" in message
    assert nothing == []


class Stream(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


def test_iterable_data_sets_are_sliced():
    by_rank = passes(lambda rank: DataLoader(Stream(range(7)), batch_size=3))
    assert joined(by_rank) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("lengths", [(3, 4), (4, 8)])
def test_ranks_that_read_different_data_are_told(lengths):
    with pytest.raises(RankError, match=r"Ranks read different data: .*split_data"):
        passes(lambda rank: DataLoader(Stream(range(lengths[rank])), batch_size=4))


def test_data_that_is_divided_already_goes_on_until_the_last_rank_is_done():
    by_rank = passes(lambda rank: DataLoader(Stream(range(10 * rank, 10 * rank + 3 + 2 * rank)), 2), split_data=False)
    assert by_rank == [
        [[[0, 1], [2], ("padding", [2])]],
        [[[10, 11], [12, 13], [14]]],
    ]


def test_the_length_of_data_that_is_divided_already_is_that_of_the_longest():
    def rank_main(rank):
        strategy = joined_ranks(split_data=False)
        return len(strategy.prepare_data([torch.zeros(1)] * (2 + rank), True))

    assert run_ranks(rank_main, 2) == [3, 3]


def test_a_rank_without_any_data_is_told():
    with pytest.raises(RankError, match="1 of 2 ranks yielded no batch"):
        passes(lambda rank: [torch.zeros(1)] * rank, split_data=False)


def test_a_distributed_sampler_is_left_in_charge():
    def distributed(rank):
        numbers = Numbers(6)
        return DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 2, rank, shuffle=False))

    (message,), nothing = warned_of(distributed)
    assert "DistributedSampler is left in charge" in message and nothing == []
    assert passes(distributed) == [[[[0, 2], [4]]], [[[1, 3], [5]]]]


def test_a_distributed_sampler_of_another_size_is_an_error():
    def rank_main(rank):
        strategy = joined_ranks()
        numbers = Numbers(6)
        strategy.prepare_data(DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 4, rank)), True)

    with pytest.raises(RankError, match=r"made for rank (0|1) of 4, but this is rank \1 of 2"):
        run_ranks(rank_main, 2)
