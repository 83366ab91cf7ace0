"""Every built-in adapter passes the suite that authors of adapters inherit; which data is served by which."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import hocket.data
from hocket import Trainer
from hocket.data.adapters import _FURTHER, adapt, as_recorded
from hocket.data.checks import check_batches
from hocket.data.errors import DataError
from hocket.data.global_batches import sized
from hocket.data.loaders import end_workers, independent
from hocket.data.source import Source
from hocket.data.training_iterator import TrainingIterator
from hocket_testkit import SourceConformance

SAMPLES, BATCH = 14, 4


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES) % 3)


class Numbers(IterableDataset[Any]):
    """A stream of numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES))


class Counter(Numbers):
    """The same, which knows its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Noisy(Dataset[Any]):
    """Samples that count how many were loaded."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return index + 100 * self.loaded

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["loaded"]


class Shuffled:
    """Batches that a function makes, without a state or a length."""

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch in torch.randperm(SAMPLES).split(BATCH))


class Walk:
    """A loader with a state and no data set."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 4:
            self.at += 1
            yield torch.full((3,), self.at) + torch.randint(9, (3,))
        self.at = 0

    state_dict, load_state_dict = Counter.state_dict, Counter.load_state_dict


def torchdata() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


# --- the suite


class TestByIndex(SourceConformance):
    kind = "indices"

    def make(self) -> Any:
        return DataLoader(samples(), BATCH, shuffle=True)


class TestByIndexWithAGenerator(TestByIndex):
    def make(self) -> Any:
        return DataLoader(samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), drop_last=True)


class TestByIndexWithReplacement(TestByIndex):
    def make(self) -> Any:
        return DataLoader(samples(), BATCH, sampler=RandomSampler(samples(), replacement=True, num_samples=40))


class TestByIndexWithoutBatches(TestByIndex):
    def make(self) -> Any:
        return DataLoader([torch.arange(3) + 3 * i for i in range(5)], batch_size=None, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.long
class TestByIndexInWorkers(TestByIndex):
    def make(self) -> Any:
        return DataLoader(samples(), BATCH, shuffle=True, num_workers=2)


@pytest.mark.long
class TestByIndexInPersistentWorkers(TestByIndex):
    epochs = 3

    def make(self) -> Any:
        options: Any = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


class TestDataSetThatCounts(TestByIndex):
    def make(self) -> Any:
        return DataLoader(Noisy(), BATCH, shuffle=True)


class TestTorchdataByIndex(TestByIndex):
    def make(self) -> Any:
        return torchdata()(samples(), BATCH, shuffle=True)


class TestList(SourceConformance):
    kind = "list"

    def make(self) -> Any:
        return [torch.arange(3) + 3 * i for i in range(5)]


class TestReplay(SourceConformance):
    kind = "replay"

    def make(self) -> Any:
        return Shuffled()


@pytest.mark.long
class TestReplayInWorkers(TestReplay):
    def make(self) -> Any:
        return DataLoader(Numbers(), 3, num_workers=2, persistent_workers=True)


class TestStatefulDataSet(SourceConformance):
    kind = "state"

    def make(self) -> Any:
        return DataLoader(Counter(), BATCH)


class TestStatefulLoader(TestStatefulDataSet):
    def make(self) -> Any:
        return Walk()


class TestTorchdata(TestStatefulDataSet):
    def make(self) -> Any:
        return torchdata()(Counter(), BATCH)


@pytest.mark.long
class TestTorchdataInWorkers(TestStatefulDataSet):
    def make(self) -> Any:
        return torchdata()(Counter(), BATCH, num_workers=2)


class TestGlobalBatches(SourceConformance):
    kind = "indices"

    def make(self) -> Any:
        return DataLoader(samples(), 5, shuffle=True)

    def source(self, slices: Any = None) -> Source:
        return super().source(slices) if slices is not None else sized(super().source().data, 3)

    exempt = {
        "test_draws_what_a_plain_loop_draws": "batches are of another size than the loader's",
        "test_another_number_of_ranks_continues": "strategies divide global batches: test_resume_ranks.py",
    }


# --- choice


class Both(DataLoader[Any]):
    """What torch plans (pytorch#166732): a loader with a state."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("a plain loader is not asked for its state")

    load_state_dict = state_dict


LOADERS = {
    "indices": lambda cls: cls(samples(), BATCH, shuffle=True),
    "state": lambda cls: cls(Counter(), BATCH),
    "replay": lambda cls: cls(Numbers(), BATCH),
}


@pytest.mark.filterwarnings("ignore:.*has no position to save")
@pytest.mark.parametrize("kind", LOADERS)
def test_plain_loaders_keep_their_adapter_when_torch_gives_them_a_state(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint from before is continued after the change."""
    before = adapt(LOADERS[kind](DataLoader))
    torch.manual_seed(1)
    batches = before.begin(0)
    next(batches)
    position = before.position(1)
    expected = [batch[0].tolist() if kind == "indices" else batch.tolist() for batch in batches]
    for name in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(DataLoader, name, getattr(Both, name), raising=False)
    after = adapt(LOADERS[kind](DataLoader))
    assert (type(after), after.kind) == (type(before), kind)
    rest = after.begin(0, position)
    assert [batch[0].tolist() if kind == "indices" else batch.tolist() for batch in rest] == expected
    after.position(2)


def test_a_state_of_ones_own_is_used() -> None:
    """Subclasses that define one are asked, unless their samples can be chosen by index."""

    class Own(Both):
        state_dict = load_state_dict = lambda self, state=None: {"mine": 1}  # type: ignore[assignment]

    source = adapt(Own(Numbers(), BATCH))
    assert source.kind == "state" and source.data in (source.within, source.between)  # type: ignore[attr-defined]
    assert adapt(Own(samples(), BATCH)).kind == "indices"


@pytest.mark.filterwarnings("ignore:.*has no position to save")
def test_the_recorded_kind_is_used_if_it_can_serve() -> None:
    """Data that has got a state since is read again, as the checkpoint has it; what the kind cannot serve is refused."""
    before = adapt(DataLoader(Numbers(), BATCH))
    batches = before.begin(0)
    next(batches)
    position, expected = before.position(1), [batch.tolist() for batch in batches]
    now = adapt(DataLoader(Counter(), BATCH))
    assert now.kind == "state" and "kind 'replay'" in now.compatible(position)
    recorded = as_recorded(now, "replay")
    assert recorded.kind == "replay" and [batch.tolist() for batch in recorded.begin(0, position)] == expected
    for other in (DataLoader(samples(), BATCH), [torch.zeros(2)]):
        assert as_recorded(adapt(other), "state").kind != "state"
    assert as_recorded(adapt(DataLoader(samples(), BATCH)), "replay").kind == "indices"


def test_a_state_of_another_owner_is_refused() -> None:
    """Both record the kind "state": torchdata's loader its own, a plain loader its data set's."""
    stateful, states = torchdata(), []
    for loader in (stateful(Counter(), BATCH), DataLoader(Counter(), BATCH)):
        source = adapt(loader)
        next(source.begin(0))
        states.append(source.position(1))
    theirs, plain = adapt(stateful(Counter(), BATCH)), adapt(DataLoader(Counter(), BATCH))
    assert theirs.compatible(states[0]) == plain.compatible(states[1]) == ""
    assert "state of a data set" in theirs.compatible(states[1])
    assert "state of torchdata's StatefulDataLoader" in plain.compatible(states[0])


def test_what_is_a_source_stays_and_is_not_divided() -> None:
    source = adapt([torch.zeros(2)])
    assert adapt(source) is source
    with pytest.raises(TypeError, match=r"hocket\.data\.adapter"):
        adapt(source, hocket.data.Slices())
    with pytest.raises(TypeError, match="cannot be iterated"):
        adapt(3)


# --- an adapter of a third party


class Tape:
    """A library's stream: batches of random numbers from a block on."""

    def blocks(self, start: int) -> Iterator[Any]:
        Tape.read = getattr(Tape, "read", 0)
        for number in range(start, 6):
            Tape.read += 1
            yield torch.rand(4, generator=torch.Generator().manual_seed(number)), torch.arange(4) % 2


class TapeSource(hocket.data.DataSource):
    """All that its author writes."""

    kind = "tape"

    @classmethod
    def serves(cls, data: Any) -> bool:
        return isinstance(data, Tape)

    def iterate(self) -> Iterator[Any]:
        return self.read(0)

    def read(self, done: int) -> Iterator[Any]:
        return self.data.blocks(done)

    def data_length(self) -> int:
        return 6


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = list(_FURTHER)
    hocket.data.adapter(TapeSource)
    yield
    _FURTHER[:] = before


class TestTape(SourceConformance):
    kind = "tape"
    exempt = {"test_draws_what_a_plain_loop_draws": "it cannot be iterated without its adapter"}

    def make(self) -> Any:
        return Tape()


# --- what the suite refuses


class Draws(TapeSource):
    def read(self, done: int) -> Iterator[Any]:
        torch.rand(1)
        return super().read(done)


class DrawsOnResume(TapeSource):
    def begin(self, epoch: int | None = None, at: Any = None) -> Iterator[Any]:
        if at is not None:
            torch.rand(1)
        return super().begin(epoch, at)


class Miscounts(TapeSource):
    def position(self, batches: int | None = None) -> Any:
        return super().position(batches and batches - 1)


class CountsItsOwn(TapeSource):
    """Samples in place of batches."""

    def read(self, done: int) -> Iterator[Any]:
        return super().read(done * getattr(self.slices, "ranks", 1))


class Trusts(TapeSource):
    def compatible(self, at: Any) -> str:
        return ""


class Lasts(TapeSource):
    """Has a worker process that nobody ends."""

    def read(self, done: int) -> Iterator[Any]:
        loader = DataLoader(samples(), BATCH, num_workers=1, persistent_workers=True)
        Lasts.kept = iter(loader)  # type: ignore[attr-defined]
        return super().read(done)


@pytest.mark.parametrize(
    ("broken", "test", "message"),
    [
        (Draws, "test_draws_what_a_plain_loop_draws", "Draw what iter"),
        (DrawsOnResume, "test_continues_from_every_position", "Leave the generators as they were"),
        (Miscounts, "test_continues_from_every_position", "A continued run is bitwise identical"),
        (CountsItsOwn, "test_another_number_of_ranks_continues", "Positions count what all ranks read"),
        (Trusts, "test_other_data_is_refused", "says nothing"),
        (Lasts, "test_close_ends_worker_processes", "leaves 1 worker processes"),
    ],
)
def test_the_suite_refuses(broken: Any, test: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second passes with each look at the clock.
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=time.sleep)
    monkeypatch.setattr("hocket_testkit.sources.time", clock)

    class Plain(Tape):
        def __iter__(self) -> Iterator[Any]:
            return self.blocks(0)

    class Suite(SourceConformance):
        kind = "tape"

        def make(self) -> Any:
            return Plain()

    hocket.data.adapter(type("Broken", (broken,), {"priority": 101}))
    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)()
    if broken is Lasts:
        end_workers(None, broken.kept)


class Raises(TapeSource):
    """Asks for an attribute that other data has not."""

    kind = "raises"
    priority = 200

    @classmethod
    def serves(cls, data: Any) -> bool:
        return bool(data.tape)


def test_an_adapter_that_raises_is_skipped_and_named_once() -> None:
    """Other data is read as before, by another adapter; what core's own adapters raise is not hidden."""
    hocket.data.adapter(Raises)
    with pytest.warns(
        UserWarning, match=r"test_sources\.Raises is skipped for list: .* AttributeError: .*no attribute 'tape'"
    ) as found:
        assert adapt([torch.zeros(2)]).kind == "list"
        assert adapt(Tape()).kind == "tape"
        assert as_recorded(adapt(DataLoader(Counter(), BATCH)), "replay").kind == "replay"
        check_batches(DataLoader(samples(), BATCH), "train_data")
        with pytest.raises(TypeError, match="train_data is a data set"):
            check_batches(samples(), "train_data")
    assert len(found) == 1

    class Odd:
        @property
        def __class__(self) -> Any:
            raise OSError("no class")

    with pytest.raises(OSError, match="no class"):
        adapt(Odd())


def test_a_third_partys_data_trains_and_resumes_without_reading_again() -> None:
    def trainer() -> Trainer:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Unflatten(0, (-1, 1)), torch.nn.Linear(1, 2))
        return Trainer(
            model=model, loss=torch.nn.functional.cross_entropy, optimizer="sgd(lr=0.1)", train_data=Tape(),
            duration="2ep", device="cpu", checkpoints=None, loggers=[],
        )  # fmt: skip

    whole, first, second = trainer(), trainer(), trainer()
    whole.fit()
    first.fit("8ba")
    Tape.read = 0
    second.load_state_dict(first.state_dict())
    second.fit("4ba")
    assert Tape.read == 4
    for one, other in zip(whole.state.model.parameters(), second.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_adapters_are_asked_by_priority() -> None:
    class Early(TapeSource):
        kind, priority = "early", 200

    class Late(TapeSource):
        kind, priority = "late", 50

    hocket.data.adapter(Late)
    hocket.data.adapter(Early)
    assert adapt(Tape()).kind == "early"
    with pytest.raises(TypeError, match="give it a kind"):
        hocket.data.adapter(hocket.data.DataSource)


def test_iterators_continue_in_the_next_epoch() -> None:
    """One iterator for all epochs: a resumed run reads past what all of them have had."""
    source = adapt(iter([torch.tensor([i]) for i in range(10)]))
    position = {**source.position(), "earlier": 3}
    source.restore(position)
    assert [batch.item() for batch in itertools.islice(source.begin(1), 2)] == [3, 4]
    again = adapt(iter([torch.tensor([i]) for i in range(10)]))
    with pytest.warns(UserWarning, match="has no position to save"):
        position = source.position(2)
    assert next(again.begin(1, {**position, "earlier": 3})).item() == 5
    with pytest.raises(DataError, match="5 batches of the epoch are done, but the training data yields 2 now"):
        adapt(iter([torch.zeros(1)] * 2)).begin(1, {**position, "earlier": 3})
    random.seed()


@pytest.mark.parametrize(("workers", "size"), [(0, 4), (2, 4), (0, None)])
def test_the_indices_of_a_batch_are_known(workers: int, size: int | None) -> None:
    """In every epoch, and in the rest of one that another process began."""

    def iterator() -> TrainingIterator:
        torch.manual_seed(1)
        return TrainingIterator(adapt(DataLoader(samples(), size, shuffle=True, num_workers=workers)))

    def rest(data: TrainingIterator, limit: int) -> list[list[int]]:
        seen = []
        while len(seen) < limit and (batch := data.next()) is not None:
            seen.append(data.indices())
            assert seen[-1] == batch[0][0].reshape(-1).tolist()
        return seen

    data = iterator()
    assert data.indices() is None
    for epoch in range(2):
        data.start(epoch)
        first = rest(data, 2)
        position = data.state_dict()
        second = rest(data, 99)
        assert sorted(itertools.chain(*first, *second)) == list(range(SAMPLES))
        again = iterator()
        again.load_state_dict(position)
        again.resume(epoch)
        assert rest(again, 99) == second


def test_data_without_indices_has_none() -> None:
    data = TrainingIterator(adapt([1, 2]))
    data.start(0)
    data.next()
    assert data.indices() is None


@pytest.mark.parametrize(
    ("limits", "expected"), [({}, [0, 1, 2, 3]), ({"limit": 3}, [0, 1, 2]), ({"overfit": 2}, [0, 1])]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_another_epoch_leaves_the_one_in_progress(limits, expected, workers) -> None:
    loader = DataLoader(torch.arange(4), 1, num_workers=workers, persistent_workers=workers > 0)
    data = TrainingIterator(adapt(loader), **limits)
    data.start(0)
    first, _ = data.next()
    with data.another_epoch(lambda: adapt(independent(loader), given=loader)) as batches:
        assert [(batch.item(), counts) for batch, counts in batches] == [(each, True) for each in expected]
    rest = [batch.item() for batch, _ in iter(data.next, None)]
    assert [first.item(), *rest] == expected
    data.close()


class Counting:
    """Data without a length, whose own state is the position."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self):
        while self.done < 5:
            self.done += 1
            yield torch.tensor([self.done])
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


@pytest.mark.parametrize(
    "make",
    [Counting, lambda: DataLoader(samples(), 3, shuffle=True), lambda: map_like(5)],
    ids=["state", "length", "replay"],
)
@pytest.mark.filterwarnings("ignore:.*no position to save")
def test_the_last_batch_is_known_and_a_position_does_not_count_one_that_was_read_to_know(make) -> None:
    def rest(data: TrainingIterator) -> list[list[int]]:
        return [batch[0].reshape(-1).tolist() for batch, _ in iter(data.next, None)]

    def iterator() -> TrainingIterator:
        torch.manual_seed(1)
        return TrainingIterator(adapt(make()))

    data = iterator()
    data.start(0)
    expected, last = [], []
    while (found := data.next()) is not None:
        expected.append(found[0][0].reshape(-1).tolist())
        last.append(data.is_last())
        assert data.is_last() == last[-1]
    assert last == [False] * (len(expected) - 1) + [True]
    for stop in range(1, len(expected) + 1):
        data = iterator()
        data.start(0)
        for _ in range(stop):
            data.next()
        data.is_last()
        again = iterator()
        again.load_state_dict(data.state_dict())
        again.resume(0)
        assert rest(again) == expected[stop:] == rest(data)


def map_like(number: int):
    class Stream:
        def __iter__(self):
            return (torch.tensor([each]) for each in range(number))

    return Stream()
