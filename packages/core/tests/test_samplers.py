"""The middle of a pass: what a sampler yields after so many items, without asking it for each of them."""

import sys
from itertools import islice

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hocket.data import DataError, Order, sized
from hocket.data.generators import DataGenerators
from hocket.data.samplers import Indices, after, draws_once, skip_items

SAMPLERS = {
    "in order": lambda n: SequentialSampler(range(n)),
    "shuffled": lambda n: RandomSampler(range(n)),
    "shuffled more than once": lambda n: RandomSampler(range(n), num_samples=2 * n + 1),
    "drawn with replacement": lambda n: RandomSampler(range(n), replacement=True, num_samples=3 * n),
    "a shuffled subset": lambda n: SubsetRandomSampler(range(5, 5 + n)),
    "weighted": lambda n: WeightedRandomSampler([*range(1, n + 1)], 2 * n),
    "a list": lambda n: [*range(n)],
    "a tuple": lambda n: (*range(n),),
    "a range": range,
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@given(n=st.integers(1, 40), skip=st.integers(0, 130), size=st.integers(1, 9), drop_last=st.booleans())
def test_what_comes_after(make, n, skip, size, drop_last) -> None:
    sampler = make(n)
    for each in (sampler, BatchSampler(sampler, size, drop_last)):
        assert draws_once(each)
        torch.manual_seed(1)
        whole = list(each)
        torch.manual_seed(1)
        items, done = after(each, skip)
        assert (done, list(items)) == (min(skip, len(whole)), whole[skip:])


@given(n=st.integers(0, 20), begin=st.integers(0, 22), skip=st.integers(0, 25))
@pytest.mark.parametrize("kind", [list, tuple, lambda items: items, iter], ids=["list", "tuple", "range", "iterator"])
def test_passing_over_from_the_middle(kind, n, begin, skip) -> None:
    items = iter(kind(range(n)))
    read = len([*islice(items, begin)])
    assert skip_items(items, skip) == min(skip, n - read)
    assert list(items) == [*range(n)][read + skip :]


def test_nothing_is_asked_for_one_by_one() -> None:
    """At a microsecond each these would take three days."""
    batches, done = after(BatchSampler(SequentialSampler(range(10**12)), 4, drop_last=False), 2 * 10**11)
    assert done == 2 * 10**11 and next(batches) == [8 * 10**11 + i for i in range(4)]


def test_a_shuffled_epoch_is_not_walked() -> None:
    """A generator that is resumed is a call."""
    calls = []
    items = iter(RandomSampler(range(10_000)))
    sys.setprofile(lambda frame, event, argument: calls.append(frame) if event == "call" else None)
    try:
        done = skip_items(items, 9_000)
    finally:
        sys.setprofile(None)
    assert done == 9_000 and len([*items]) == 1_000
    assert sum(frame.f_code.co_name == "__iter__" for frame in calls) < 10


def test_a_sampler_that_goes_on_drawing_has_a_stream_of_its_own() -> None:
    """What it yields does not depend on what a model draws, nor what a model draws on it."""

    class Draws:
        def __iter__(self):
            for _ in range(4):
                yield torch.rand(()).item()

    torch.manual_seed(3)
    expected = list(Draws())
    torch.manual_seed(3)
    indices, seen = Indices(Draws(), DataGenerators(None)), []
    seen.append(next(indices))  # a draw like any other
    model = torch.get_rng_state()
    for _ in range(3):
        seen.append(next(indices))
        assert torch.equal(torch.get_rng_state(), model)
        torch.rand(5)
        model = torch.get_rng_state()
    assert seen == expected


class Backwards(Order):
    """From the last sample to the first."""

    def __init__(self, samples: int, batch_size: int, fingerprint: str = "backwards") -> None:
        self.samples, self.batch_size, self.fingerprint = samples, batch_size, fingerprint
        self.begun_at: list[int] = []

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def after(self, skip):
        self.begun_at.append(skip)
        done = min(skip, len(self))
        numbers = list(range(self.samples))[::-1]
        starts = range(done * self.batch_size, self.samples, self.batch_size)
        return (numbers[at : at + self.batch_size] for at in starts), done


def test_an_order_is_resized_and_resumed_where_it_is() -> None:
    order = Backwards(10, 2)
    loader = DataLoader(range(10), batch_sampler=order)
    source = sized(loader, 4)
    batches = source.begin(0)
    assert next(batches).tolist() == [9, 8, 7, 6]
    position = source.position(1)
    again = Backwards(10, 2)
    rest = sized(DataLoader(range(10), batch_sampler=again), 4).begin(0, position)
    assert [batch.tolist() for batch in rest] == [[5, 4, 3, 2], [1, 0]]
    assert again.begun_at == [1] and order.batch_size == 2


def test_a_position_in_another_order_is_refused() -> None:
    source = sized(DataLoader(range(10), batch_sampler=Backwards(10, 2)), 4)
    next(source.begin(0))
    other = sized(DataLoader(range(10), batch_sampler=Backwards(10, 2, "by name")), 4)
    with pytest.raises(DataError, match=r"order of the training data was backwards .* is by name now"):
        other.begin(0, source.position(1))
