"""Every sample goes to one rank, once, in every kind of data that a user may bring, and global batches are what was asked."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
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

from hocket import Strategy
from hocket.data import Order
from hocket.data.adapters import adapt
from hocket.data.batches import Padding
from hocket.data.errors import DataError
from hocket.data.global_batches import sized
from hocket.data.samplers import after
from hocket.data.training_iterator import TrainingIterator
from hocket.devices.cpu import CPU
from hocket_strategies import DDP
from hocket_strategies.rank_slices import bounds, sliced
from hocket_testkit.ranks import RankError, run_ranks


@given(samples=st.integers(0, 200), world_size=st.integers(1, 17))
def test_shares_are_contiguous_and_even(samples, world_size):
    shares = [bounds(samples, rank, world_size) for rank in range(world_size)]
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


def passes(make, world_size=2, train=True, epochs=1, global_batch=None, **options):
    """By rank and pass, the batches of the data that ``make(rank)`` returns: lists, and ``("padding", list)``."""

    def rank_main(rank):
        torch.manual_seed(100 + rank)  # ranks differ, as they do under a Trainer
        random.seed(100 + rank)
        if numpy is not None:
            numpy.random.seed(100 + rank)
        strategy = joined_ranks(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = strategy.prepare_data(make(rank), train, global_batch)
        return [plainly(data) for _ in range(epochs)]

    return run_ranks(rank_main, world_size)


def plainly(data):
    return [("padding", b.batch.tolist()) if isinstance(b, Padding) else b.tolist() for b in data]


def joined(by_rank, epoch=0):
    """The global batches of a pass: what ranks have at the same place, without padding."""
    return [
        [i for part in parts if part and part[0] != "padding" for i in part]
        for parts in itertools.zip_longest(*(rank[epoch] for rank in by_rank))
    ]


# --- the arithmetic, for any numbers; the ranks take turns in this process


def shares_of(make, ranks, global_batch=None, *, train=True, pad=True, end=False):
    """By rank, the batches of one pass and how many the data says that there are."""
    by_rank = []
    for rank in range(ranks):
        strategy = Strategy()
        strategy.rank, strategy.world_size = rank, ranks
        torch.manual_seed(1)  # as if rank 0's random numbers had been sent
        data = sliced(make(), strategy, global_batch, train=train, pad=pad, end=end)
        by_rank.append((plainly(data), len(data)))
    assert all(len(batches) == said for batches, said in by_rank)
    return [[batches] for batches, _ in by_rank]


def alone(data):
    torch.manual_seed(1)
    return [batch.tolist() for batch in data]


SIXTY = settings(max_examples=60)
loaders = {
    "samples": st.integers(1, 40),
    "size": st.integers(1, 9),
    "ranks": st.integers(1, 5),
    "drop_last": st.booleans(),
    "shuffle": st.booleans(),
}


def test_the_middle_of_a_pass_is_not_walked_to():
    """At a microsecond each the batches before would take a day."""

    def rank_main(rank):
        loader = sliced(DataLoader(Numbers(10**12), 4), joined_ranks(), None, train=True, pad=True, end=False)
        batches, done = after(loader.data.batch_sampler, 10**11)
        return done, next(batches)

    middle = 8 * 10**11
    assert run_ranks(rank_main, 2) == [(10**11, [middle + 4 * rank + i for i in range(4)]) for rank in range(2)]


@SIXTY
@given(**loaders, more=st.integers(0, 12))
def test_a_global_batch_is_that_of_one_process(samples, size, ranks, drop_last, shuffle, more):
    def loader(batch_size=size):
        return DataLoader(Numbers(samples), batch_size, shuffle=shuffle, drop_last=drop_last)

    by_rank = shares_of(loader, ranks, ranks + more)
    expected = alone(loader(ranks + more))
    assert joined(by_rank) == expected == alone(sized(loader(), ranks + more))
    for place, batch in enumerate(expected):
        sizes = [len(each[0][place]) if each[0][place][0] != "padding" else 0 for each in by_rank]
        assert sum(sizes) == len(batch) and max(sizes) - min(sizes) <= 1


class Backwards(Order):
    """From the last sample to the first, in lists whose size can be set."""

    def __init__(self, samples, batch_size):
        self.samples, self.batch_size, self.parts = samples, batch_size, []

    def __len__(self):
        return -(-self.samples // self.batch_size)

    def after(self, skip):
        numbers, done = list(range(self.samples))[::-1], min(skip, len(self))
        starts = range(done * self.batch_size, self.samples, self.batch_size)
        return (numbers[at : at + self.batch_size] for at in starts), done

    def of_rank(self, rank, ranks):
        self.parts.append((rank, ranks))
        return self


@SIXTY
@given(samples=st.integers(1, 40), size=st.integers(1, 9), ranks=st.integers(1, 5), end=st.booleans())
def test_an_order_has_the_same_global_batches_on_any_number_of_ranks(samples, size, ranks, end):
    orders = []

    def loader():
        orders.append(Backwards(samples, size))
        return DataLoader(Numbers(samples), batch_sampler=orders[-1])

    by_rank = shares_of(loader, ranks, end=end, pad=not end)
    whole = [numbers.tolist() for numbers in torch.arange(samples - 1, -1, -1).split(size * ranks)]
    if end and len(whole[-1]) < ranks:
        whole.pop()
    assert joined(by_rank) == whole
    assert [order.parts for order in orders] == [[(rank, ranks)] for rank in range(ranks)]


@SIXTY
@given(**loaders)
def test_a_batch_size_is_each_ranks_own(samples, size, ranks, drop_last, shuffle):
    def loader(batch_size=size):
        return DataLoader(Numbers(samples), batch_size, shuffle=shuffle, drop_last=drop_last)

    by_rank = shares_of(loader, ranks)
    assert joined(by_rank) == alone(loader(size * ranks))
    assert {len(batch) for (batches,) in by_rank for batch in batches[:-1]} <= {size}


@SIXTY
@given(**loaders)
def test_evaluation_has_the_batches_of_one_process(samples, size, ranks, drop_last, shuffle):
    def loader():
        return DataLoader(Numbers(samples), size, shuffle=shuffle, drop_last=drop_last)

    by_rank = shares_of(loader, ranks, train=False, pad=False)
    assert [each for (batches,) in by_rank for each in batches] == [
        each for rank in range(ranks) for each in alone(loader())[rank::ranks]
    ]
    padded = shares_of(loader, ranks, train=False)
    assert joined(padded) == joined(by_rank) and len({len(batches) for (batches,) in padded}) == 1


@SIXTY
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), ranks=st.integers(1, 5), whole=st.booleans())
def test_batches_of_a_sampler_of_ones_own_go_one_to_each_rank(sizes, ranks, whole):
    """As do the batches of other iterables, and single indices that stand for batches."""
    ends = list(itertools.accumulate(sizes))
    indices = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    makers = [
        lambda: DataLoader(Numbers(sum(sizes)), batch_sampler=indices),
        lambda: [torch.tensor(each) for each in indices],
        lambda: DataLoader([torch.tensor(each) for each in indices], batch_size=None),
    ]
    for make in makers:
        by_rank = shares_of(make, ranks, end=whole)
        groups = [indices[start : start + ranks] for start in range(0, len(indices), ranks)]
        if whole:
            groups = [group for group in groups if len(group) == ranks]
        assert joined(by_rank) == [[i for each in group for i in each] for group in groups]
        assert [[each for each in batches if each[0] != "padding"] for (batches,) in by_rank] == [
            [group[rank] for group in groups if rank < len(group)] for rank in range(ranks)
        ]
        assert {len(batches) for (batches,) in by_rank} == {len(groups)}


@SIXTY
@given(**loaders, more=st.integers(0, 12))
def test_a_pass_can_end_before_a_rank_goes_without(samples, size, ranks, drop_last, shuffle, more):
    def loader():
        return DataLoader(Numbers(samples), size, shuffle=shuffle, drop_last=drop_last)

    for global_batch in (None, ranks + more):
        by_rank = shares_of(loader, ranks, global_batch, end=True)
        assert not any(each[0] == "padding" for (batches,) in by_rank for each in batches)
        expected = joined(shares_of(loader, ranks, global_batch))
        assert joined(by_rank) == [batch for batch in expected if len(batch) >= ranks]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ([4, 3, 4], r"a batch of 3 samples that is not the last.*make batches of 4"),
        ([4, 5], r"global_batch=4, but .* a batch of 5 samples"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_cannot_be_set_are_checked(sizes, message, ranks):
    indices = [list(range(size)) for size in sizes]
    for data in (DataLoader(Numbers(9), batch_sampler=indices), [torch.tensor(each) for each in indices]):
        with pytest.raises(DataError, match=message):
            list(sized(data, 4) if ranks == 1 else shares_of(lambda data=data: data, ranks, 4))


def test_batches_that_cannot_be_set_are_divided():
    for data in (
        DataLoader(Numbers(9), batch_sampler=[[0, 1, 2, 3], [4, 5, 6]]),
        [torch.arange(4), torch.arange(4, 7)],
        DataLoader([torch.arange(4), torch.arange(4, 7)], batch_size=None),
        DataLoader(Stream(range(7)), 4),
    ):
        if not isinstance(data, DataLoader) or data.batch_sampler is None:
            assert len(sized(data, 4)) == 2
        assert alone(sized(data, 4)) == [[0, 1, 2, 3], [4, 5, 6]]
        strategies = [Strategy(), Strategy()]
        strategies[1].rank = 1
        for strategy in strategies:
            strategy.world_size = 2
        halves = [plainly(sliced(data, each, 4, train=True, pad=True, end=False)) for each in strategies]
        assert halves == [[[0, 1], [4, 5]], [[2, 3], [6]]]


@pytest.mark.parametrize("size", [0, -8, 2.5, True])
def test_a_global_batch_is_a_number_of_samples(size):
    with pytest.raises(ValueError, match=r"global_batch=.* is not enough for 1 rank: .* an int of 1 or more"):
        sized([], size)


# --- DataLoaders over map-style data sets


def test_each_rank_gets_its_slice_of_every_batch():
    by_rank = [
        [[[0, 1], [4, 5], [8]]],
        [[[2, 3], [6, 7], ("padding", [8])]],
    ]
    assert passes(lambda rank: DataLoader(Numbers(9), batch_size=2)) == by_rank
    assert passes(lambda rank: DataLoader(Numbers(9), batch_size=7), global_batch=4) == by_rank


def test_fewer_samples_than_ranks_are_no_global_batch():
    with pytest.raises(RankError, match=r"global_batch=2 is not enough for 3 ranks: .* an int of 3 or more"):
        passes(lambda rank: DataLoader(Numbers(9), batch_size=4), 3, global_batch=2)


def test_evaluation_leaves_out_batches_without_a_share():
    assert passes(lambda rank: DataLoader(Numbers(9), batch_size=4), train=False) == [
        [[[0, 1, 2, 3], [8]]],
        [[[4, 5, 6, 7]]],
    ]


def test_a_rank_loads_only_its_share():
    def rank_main(rank):
        strategy = joined_ranks()
        numbers = Numbers(10)
        list(strategy.prepare_data(DataLoader(numbers, batch_size=2), True))
        return numbers.loaded

    assert run_ranks(rank_main, 2) == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]


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
    assert joined(passes(weighted, global_batch=4)) == [batch.tolist() for batch in weighted(0)]


@pytest.mark.parametrize("kind", ["shuffle", "own generators", "subset", "batch sampler", "batches as samples"])
def test_the_global_batches_are_those_of_one_process(kind):
    """Rank 0's random numbers decide, and it draws them as if it were alone."""
    torch.manual_seed(100)
    loader = SHUFFLED[kind](0)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    by_rank = passes(SHUFFLED[kind], world_size=2, epochs=2, global_batch=4)
    assert [joined(by_rank, 0), joined(by_rank, 1)] == expected


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
        loader = DataLoader(Numbers(11), 4, collate_fn=lambda items: ("collated", len(items)), drop_last=True)
        batches = list(strategy.prepare_data(loader, True))
        return batches, list(loader), list(sized(loader, 3)), list(loader)

    own = [("collated", 4)] * 2
    assert run_ranks(rank_main, 2)[0] == (own[:1], own, [("collated", 3)] * 3, own)


def test_plug_ins_find_the_loader_that_is_read_from():
    """Per-sample transforms stand in for its data set while a fit lasts; the user's own loader does not notice."""

    def rank_main(rank):
        loader = DataLoader(Numbers(8), 2)
        prepared = joined_ranks().prepare_data(loader, True)
        vars(prepared.data)["dataset"] = range(100, 108)
        return [batch.tolist() for batch in prepared], [batch.tolist() for batch in loader]

    assert run_ranks(rank_main, 2) == [
        ([[100, 101], [104, 105]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([[102, 103], [106, 107]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ]


def test_a_feed_can_end_a_pass_with_persistent_workers_and_begin_another():
    def rank_main(rank):
        strategy = joined_ranks()
        loader = DataLoader(Numbers(12), 2, num_workers=1, persistent_workers=True)
        feed = TrainingIterator(adapt(strategy.prepare_data(loader, True)))
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
        feed = TrainingIterator(adapt(strategy.prepare_data(DataLoader(Numbers(8), 4, sampler=Told()), True)))
        feed.start(7)
        return feed.next()[0].tolist()

    assert run_ranks(rank_main, 2) == [[7, 7], [7, 7]]


# --- anything else


def test_the_batches_of_other_iterables_go_round():
    def batches(rank):
        return [torch.arange(4), torch.arange(4, 9), torch.tensor([9])]

    assert passes(batches) == [
        [[[0, 1, 2, 3], [9]]],
        [[[4, 5, 6, 7, 8], ("padding", [9])]],
    ]
    assert passes(batches, train=False)[1] == [[[4, 5, 6, 7, 8]]]


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


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batches_of_iterable_data_sets_go_round(drop_last):
    """With drop_last there are neither small batches nor small global batches."""
    by_rank = passes(lambda rank: DataLoader(Stream(range(10)), batch_size=3, drop_last=drop_last))
    assert by_rank == [
        [[[0, 1, 2], *([] if drop_last else [[6, 7, 8]])]],
        [[[3, 4, 5], *([] if drop_last else [[9]])]],
    ]


@pytest.mark.parametrize("lengths, global_batch", [((3, 4), 4), ((4, 8), 4), ((3, 5), None), ((12, 8), None)])
def test_ranks_that_read_different_data_are_told(lengths, global_batch):
    with pytest.raises(RankError, match=r"Ranks read different data: .*split_data"):
        passes(lambda rank: DataLoader(Stream(range(lengths[rank])), batch_size=4), global_batch=global_batch)


def test_data_that_is_divided_already_goes_on_until_the_last_rank_is_done():
    by_rank = passes(lambda rank: DataLoader(Stream(range(10 * rank, 10 * rank + 3 + 2 * rank)), 2), split_data=False)
    assert by_rank == [
        [[[0, 1], [2], ("padding", [2])]],
        [[[10, 11], [12, 13], [14]]],
    ]


@pytest.mark.parametrize("uneven, expected", [("pad", 4), ("end", 3)])
def test_a_loader_of_four_and_one_of_three_batches(uneven, expected):
    """They end together; so do passes after that, and what they say of their length is true."""

    def rank_main(rank):
        loader = DataLoader(Numbers(8 - 2 * rank), 2)
        data = joined_ranks(split_data=False, uneven=uneven).prepare_data(loader, True)
        return len(data), [plainly(data) for _ in range(2)]

    for rank, (length, (first, second)) in enumerate(run_ranks(rank_main, 2)):
        own = [[0, 1], [2, 3], [4, 5], ("padding", [4, 5]) if rank else [6, 7]]
        assert (length, first, second) == (expected, own[:expected], own[:expected])


def test_where_the_last_global_batch_is_too_small_a_pass_can_end():
    def loader(rank):
        return DataLoader(Numbers(9), batch_size=2)

    assert joined(passes(loader, uneven="end")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert joined(passes(loader, uneven="end", train=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_what_uneven_may_be():
    with pytest.raises(ValueError, match=r"uneven='join'.*'pad'.*or 'end'"):
        DDP(uneven="join")


@pytest.mark.parametrize("uneven", ["pad", "end"])
def test_a_rank_without_any_data_is_told(uneven):
    with pytest.raises(RankError, match="1 of 2 ranks yielded no batch"):
        passes(lambda rank: [torch.zeros(1)] * rank, split_data=False, uneven=uneven)


def test_data_that_is_divided_already_has_no_global_batch():
    with pytest.raises(
        RankError, match=r"global_batch=8 does not apply to data that already differs between ranks.*batch_size"
    ):
        passes(lambda rank: [torch.zeros(4)], split_data=False, global_batch=8)


def test_a_distributed_sampler_is_left_in_charge():
    def distributed(rank):
        numbers = Numbers(6)
        return DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 2, rank, shuffle=False))

    (message,), nothing = warned_of(distributed)
    assert "DistributedSampler divides the data" in message and nothing == []
    assert passes(distributed) == [[[[0, 2], [4]]], [[[1, 3], [5]]]]


def test_a_distributed_sampler_of_another_size_is_an_error():
    def rank_main(rank):
        strategy = joined_ranks()
        numbers = Numbers(6)
        strategy.prepare_data(DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 4, rank)), True)

    with pytest.raises(RankError, match=r"made for rank (0|1) of 4, but this is rank \1 of 2"):
        run_ranks(rank_main, 2)
