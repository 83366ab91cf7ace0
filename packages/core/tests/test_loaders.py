"""The private names of torch's and torchdata's loaders that hocket reads: there, and meaning what they are used for.

A failure after an upgrade says which name changed; `hocket.data.loaders` and `hocket.data.sources.torchdata` say what is lost.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

import hocket.data
from hocket.data import loaders
from hocket.data.sources.torchdata import ended_workers, is_loader_state

ALIVE: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
PRIVATE = {
    "_BaseDataLoaderIter": "loaders.py",
    "_iterator": "loaders.py",
    "_index_sampler": "loaders.py",
    "_shutdown_workers": "loaders.py",
    "_dataset_fetcher": "loaders.py",
    "_snapshot": "torchdata.py",
    "_worker_snapshots": "torchdata.py",
    "_iterator_finished": "torchdata.py",
    "fetcher_ended": "torchdata.py",
}


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(8))


class Stream(IterableDataset[Any]):
    """Three samples, or one for the first of two workers."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        return iter(range(1 if info and info.id == 0 else 3))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def drawn(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


def test_a_loader_keeps_the_iterator_of_persistent_workers() -> None:
    loader = DataLoader(numbers(), 4, **ALIVE)
    assert vars(loader)["_iterator"] is None and not loaders.workers_alive(loader)
    batches = iter(loader)
    assert vars(loader)["_iterator"] is batches and loaders.workers_alive(loader)
    assert loaders.is_loader_iterator(batches) and loaders.is_loader_iterator(iter(DataLoader(numbers())))
    loaders.end_workers(loader, batches)
    assert vars(loader)["_iterator"] is None and not loaders.workers_alive(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_iterator_are_ended_at_once(persistent: bool) -> None:
    loader = DataLoader(numbers(), 4, num_workers=1, persistent_workers=persistent)
    batches: Any = iter(loader)
    next(batches)
    (worker,) = batches._workers
    begin = time.monotonic()
    loaders.end_workers(loader, batches)
    worker.join(4)
    assert not worker.is_alive() and time.monotonic() - begin < 4


@pytest.mark.parametrize("options", [{}, ALIVE])
def test_a_sampler_stands_in_for_one_epoch(options: dict[str, Any]) -> None:
    """Of living workers too, in their second epoch; the loader's own sampler is back afterwards."""
    loader = DataLoader(numbers(), 4, **options)
    own = loader.batch_sampler
    for _ in range(2):
        with loaders.standing_in(loader, "batch_sampler", [[7], [5, 3]]):
            batches = iter(loader)
        assert loader.batch_sampler is own and drawn(batches) == [[7], [5, 3]]
    plain: Any = loaders.with_sampler(loader, batch_sampler=[[1]])
    assert drawn(plain) == [[1]] and type(plain) is DataLoader
    loaders.end_workers(loader)
    loaders.end_workers(plain)


def test_torch_forbids_what_stands_in() -> None:
    """The reason for ``vars(loader)``. If this fails, assign instead."""
    with pytest.raises(ValueError, match="batch_sampler attribute should not be set"):
        DataLoader(numbers(), 4).batch_sampler = None


def test_another_name_of_the_sampler_is_an_error_and_no_silent_epoch() -> None:
    loader: Any = DataLoader(numbers(), 4, **ALIVE)
    own = loader.batch_sampler
    vars(loader)["_iterator"] = object()  # as if torch had renamed its _index_sampler
    with pytest.raises(AttributeError, match="_index_sampler"), loaders.standing_in(loader, "batch_sampler", []):
        pass
    assert loader.batch_sampler is own
    vars(loader)["_iterator"] = None


def test_the_fetcher_knows_that_a_stream_has_ended() -> None:
    batches = iter(DataLoader(Stream(), 2))
    fetcher = loaders.fetcher_of(batches)
    assert fetcher is not None
    next(batches)
    assert not loaders.has_ended(fetcher)
    next(batches)  # one sample
    assert loaders.has_ended(fetcher)
    exact = iter(DataLoader(Stream(), 3))
    fetcher = loaders.fetcher_of(exact)
    next(exact)
    assert not loaders.has_ended(fetcher)  # nobody has asked for a fourth
    assert loaders.fetcher_of(iter([1])) is None and not loaders.has_ended(None)


def test_a_data_set_and_its_workers_are_exchanged() -> None:
    loader = DataLoader(numbers(), 4, **ALIVE)
    mine = iter(loader)
    before = loaders.exchange_dataset(loader, TensorDataset(torch.arange(10, 18)), None)
    assert drawn(loader) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    other, workers = loaders.exchange_dataset(loader, *before)
    assert workers is not mine and other.tensors[0][0] == 10 and drawn(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loaders.end_workers(None, workers)
    loaders.end_workers(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_torchdatas_loader(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(Stream(), 1, num_workers=workers)
    batches, ended = iter(loader), []
    for _ in batches:
        state = loader.state_dict()
        assert is_loader_state(state)
        ended.append(ended_workers(state))
    assert not is_loader_state(Stream().state_dict()) and ended_workers({}) == []
    if workers:  # of four samples the first worker has one
        assert ended[0] == [False, False] and [True, False] in ended
    else:
        assert ended == [[], [], []]


def test_private_names_are_read_in_one_file_each() -> None:
    """By whatever spelling: attribute, string or import."""
    folder = Path(hocket.data.__file__).parent
    found: dict[str, set[str]] = {}
    for file in [*folder.rglob("*.py"), *(folder.parent / "training").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                continue
            names = [getattr(node, name, None) for name in ("attr", "value", "arg", "name")]
            for name in PRIVATE.keys() & {each for each in names if isinstance(each, str)}:
                found.setdefault(name, set()).add(file.name)
    assert found == {name: {file} for name, file in PRIVATE.items()}


def test_samplers_and_batch_sizes() -> None:
    assert (
        loaders.batch_size(DataLoader(numbers(), 4)) == 4
        and loaders.sampler_name(DataLoader(numbers())) == "batch_sampler"
    )
    single: Any = DataLoader(numbers(), None, sampler=SequentialSampler(range(8)))
    assert loaders.batch_size(single) is None and loaders.sampler_name(single) == "sampler"
    assert loaders.batch_size(DataLoader(Stream(), 4)) is None
