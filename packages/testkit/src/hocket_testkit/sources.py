"""The suite for adapters of data."""

from __future__ import annotations

import io
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from hocket.basics import seeding
from hocket.data.adapters import adapt
from hocket.data.batches import count, slice_samples
from hocket.data.errors import DataError
from hocket.data.rank_slices import Slices
from hocket.data.source import Position, Source, set_epoch
from hocket.errors import Unsupported
from hocket_testkit.compare import difference


class Taken(NamedTuple):
    """The state of a run after a batch, or between two epochs: its position, and the random numbers of the process."""

    epoch: int
    #: Batches of the epoch that were yielded; None between two epochs.
    batches: int | None
    position: Position
    random: dict[str, Any]

    def __str__(self) -> str:
        return f"epoch {self.epoch}, " + ("between epochs" if self.batches is None else f"after batch {self.batches}")


class Part(Slices):
    """Divide every batch evenly over ranks; the first ranks get one sample more if it is not divisible."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """See :meth:`hocket.data.Slices.slice`."""
        for batch in batches:
            yield self.of(batch)

    def of(self, batch: Any) -> Any:
        """Return this rank's samples of a batch."""
        samples = count(batch).samples
        return slice_samples(batch, self.rank * samples // self.ranks, (self.rank + 1) * samples // self.ranks)


class SourceConformance:
    """The tests that every adapter must pass. Define ``make``, which returns new data; the adapter has to be registered.

    Batches are tensors, or tuples, lists and dicts of them. Between two batches the suite draws from the global generators, as
    models with dropout do.

    Example:
        >>> import hocket, torch
        >>> class TestLists(hocket.testkit.SourceConformance):
        ...     kind = "list"
        ...     def make(self):
        ...         return [torch.arange(4) + 4 * number for number in range(5)]
    """

    #: The ``kind`` of the adapter that is expected to serve the data.
    kind = ""
    #: Epochs to compare.
    epochs = 2
    #: Test -> why it does not apply.
    exempt: dict[str, str] = {}

    def make(self) -> Any:
        """Return new data, in the state at the start of a run."""
        raise Unsupported(f"{type(self).__name__} needs a make(self) that returns new data to test.")

    def source(self, slices: Slices | None = None) -> Source:
        """Return a source of new data."""
        _seed(3)
        return adapt(self.make(), slices)

    @pytest.fixture(autouse=True)
    def _begin(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if (test := request.function.__name__) in self.exempt:
            pytest.skip(self.exempt[test])
        with seeding.preserved(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*has no position to save")
            yield

    # --- the suite

    def test_is_served_by_the_adapter(self) -> None:
        """`hocket.data.adapt` finds it, and recognizes a source that is one already."""
        source = self.source()
        assert isinstance(source, Source) and adapt(source) is source
        assert source.kind == self.kind, f"The data is served by an adapter of the kind '{source.kind}'."

    def test_draws_what_a_plain_loop_draws(self) -> None:
        """Batches and global random numbers are those of ``for batch in data``, at every place."""
        _seed(3)
        data = self.make()
        _seed(4)
        expected, found = [], []
        for epoch in range(self.epochs):
            set_epoch(data, epoch)
            expected += _seen(iter(data))
        source = self.source()
        _seed(4)
        for epoch in range(self.epochs):
            found += _seen(source.begin(epoch))
        source.close()
        problem = difference(found, expected, at="[2 x the batch, or its random numbers]")
        assert problem is None, (
            f"A plain loop over the data gives something else: {problem}. Draw what iter(data) draws."
        )

    def test_continues_from_every_position(self) -> None:
        """The rest of the run is the same in a new process, from the middle of an epoch and from its end."""
        run, taken = self._run()
        for each in taken:
            source = self.source()
            _seed(99)
            before = _numbers()
            if each.batches is None:
                source.restore(each.position)
                rest: list[Any] = []
            else:
                batches = source.begin(each.epoch, each.position)
                found = difference(_numbers(), before, at="random numbers")
                assert found is None, f"{each}: begin(at=…) draws: {found}. Leave the generators as they were."
                _continue_with(each.random)
                rest = _rest(batches)
            if each.batches is None:
                _continue_with(each.random)
            for epoch in range(each.epoch + 1, self.epochs):
                rest += _rest(source.begin(epoch))
            source.close()
            expected = [batch for epoch, number, batch in run if (epoch, number) >= _next(each)]
            problem = difference(rest, expected, at="the rest of the run")
            assert problem is None, f"{each}: {problem}. A continued run is bitwise identical."

    def test_continues_where_it_is(self) -> None:
        """A source whose iteration an exception ended starts again at its own position."""
        run, taken = self._run()
        each = next(each for each in taken if each.batches is not None)
        source = self.source()
        next(iter(source.begin(0)))
        source.close()
        batches = source.begin(each.epoch, each.position)
        _continue_with(each.random)
        rest = _rest(batches)
        source.close()
        expected = [batch for epoch, number, batch in run if epoch == each.epoch and number >= (each.batches or 0)]
        assert difference(rest, expected, at="the rest of the epoch") is None

    def test_another_number_of_ranks_continues(self) -> None:
        """Three ranks continue with the same batches where two ranks stopped."""
        run, taken = self._run()
        whole = [batch for epoch, _, batch in run if not epoch]
        cut = len(whole) // 2
        positions = []
        for rank in range(2):
            source = self.source(Part(rank, 2))
            _seed(4)
            batches = source.begin(0)
            for _ in range(cut):
                next(batches)
                _model()
            positions.append(_through_a_file(source.position(cut)))
            source.close()
        at = next(each.random for each in taken if (each.epoch, each.batches) == (0, cut))
        for rank in range(3):
            part = Part(rank, 3)
            source = self.source(part)
            batches = source.begin(0, source.reshare(positions, 3))
            _continue_with(at)
            found, expected = _rest(batches), [part.of(batch) for batch in whole[cut:]]
            source.close()
            problem = difference(found, expected, at=f"the rest of the epoch on rank {rank} of 3")
            assert problem is None, f"{problem}. Positions count what all ranks read."

    def test_length(self) -> None:
        """``length()`` is that of an epoch, or None, and draws nothing."""
        source = self.source()
        before = _numbers()
        length = source.length()
        assert difference(_numbers(), before, at="random numbers") is None
        batches = len(_rest(source.begin(0)))
        source.close()
        assert length in (None, batches), f"length() is {length}, but an epoch has {batches} batches."

    def test_close_ends_worker_processes(self) -> None:
        """``close()`` ends worker processes, and the source can be used again."""
        others = {child.pid for child in multiprocessing.active_children()}
        source = self.source()
        next(source.begin(0))
        source.close()
        until = time.monotonic() + 5
        while left := [child for child in multiprocessing.active_children() if child.pid not in others]:
            assert time.monotonic() < until, f"close() leaves {len(left)} worker processes."
            time.sleep(0.02)
        assert next(source.begin(1), None) is not None
        source.close()

    def test_other_data_is_refused(self) -> None:
        """A position of another kind, or of another number of batches, is an error that says so."""
        _, taken = self._run()
        position = next(each.position for each in taken if each.batches is not None)
        source = self.source()
        assert source.compatible(position) == ""
        wrong = [{**position, "kind": "another"}]
        if (length := source.length()) is not None:
            wrong.append({**position, "batches": length + 7})
        for each in wrong:
            assert source.compatible(each), "compatible() says nothing."
            with pytest.raises(DataError):
                source.begin(0, each)

    # --- runs

    def _run(self) -> tuple[list[tuple[int, int, Any]], list[Taken]]:
        """Return the batches of a run, by epoch and number, and the states after each of them and between epochs."""
        source = self.source()
        _seed(4)
        run: list[tuple[int, int, Any]] = []
        taken = []
        for epoch in range(self.epochs):
            number = 0
            for number, batch in enumerate(source.begin(epoch), 1):
                run.append((epoch, number - 1, batch))
                _model()
                taken.append(_taken(source, epoch, number))
            assert number > 1, "Give data with two batches or more."
            taken.append(_taken(source, epoch, None))
        source.close()
        return run, taken


def _taken(source: Source, epoch: int, batches: int | None) -> Taken:
    drawn = _numbers()
    position = _through_a_file(source.position(batches))
    assert difference(_numbers(), drawn, at="random numbers") is None, "position() draws."
    return Taken(epoch, batches, position, drawn)


def _next(taken: Taken) -> tuple[int, int]:
    return (taken.epoch + 1, 0) if taken.batches is None else (taken.epoch, taken.batches)


def _through_a_file(position: Position) -> Position:
    """Return a position as read from a checkpoint: only tensors and plain values."""
    file = io.BytesIO()
    torch.save(position, file)
    file.seek(0)
    read: Position = torch.load(file, weights_only=True)
    return read


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _model() -> None:
    """Draw random numbers, as dropout and augmentation do."""
    torch.rand(3)
    random.random()


def _rest(batches: Iterator[Any]) -> list[Any]:
    found = []
    for batch in batches:
        found.append(batch)
        _model()
    return found


def _seen(batches: Iterator[Any]) -> list[Any]:
    """Return batches, each followed by the global random numbers when it was yielded; first those after ``iter``."""
    found = [_numbers()]
    for batch in batches:
        found += [batch, _numbers()]
        _model()
    return [*found, _numbers()]


def _numbers() -> dict[str, Any]:
    """Return the state of the global generators of the host."""
    return seeding.to_tree(seeding.capture(devices=False))


def _continue_with(numbers: dict[str, Any]) -> None:
    seeding.restore(seeding.from_tree(numbers))
