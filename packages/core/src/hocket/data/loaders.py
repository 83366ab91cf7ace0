"""torch's DataLoader: queries, changed copies, and, in this file only, the private names that hocket uses.

``tests/test_loaders.py`` checks every private name against the installed torch. If torch renames one:

- ``_iterator``, the iterator that a loader with persistent workers keeps: workers are not ended at once, but by the garbage
  collector, and a resumed run starts them with other random numbers.
- ``_iterator._index_sampler``: the second epoch of persistent workers would use the loader's own sampler, which checkpoints
  do not record. `standing_in` raises AttributeError instead.
- ``_shutdown_workers`` of an iterator: workers of an epoch that ends by an exception stay for five seconds each.
- ``_dataset_fetcher.ended``: a stream that ended with a smaller last batch is continued with another epoch.

``vars(loader)`` bypasses ``DataLoader.__setattr__``, which forbids a new sampler because a running iterator would ignore it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard
from weakref import ReferenceType, ref

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hocket.data.stateful import has_state

# --- queries


def by_index(data: object) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader over a map-style data set, whose samples can be chosen before they are loaded."""
    return isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)


def batch_size(data: Any) -> int | None:
    """Return the batch size if it can be set: that of a DataLoader, torch's BatchSampler or an `Order`. Otherwise None."""
    sampler: Any = data.batch_sampler if by_index(data) else None
    if sampler is None:
        return None
    from hocket.data.samplers import Order

    settable = type(sampler) is BatchSampler or (isinstance(sampler, Order) and hasattr(sampler, "batch_size"))
    if data.batch_size is None and not settable:
        return None
    return int(sampler.batch_size)


def sampler_name(loader: DataLoader[Any]) -> str:
    """Return the name of the sampler that yields one item per batch; without a batch size every sample is a batch."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def has_own_state(data: object) -> bool:
    """Whether data has a state that is not inherited from torch's DataLoader (pytorch#166732 plans one).

    The state planned there is tied to one process and one number of workers, so a plain DataLoader keeps its adapter.
    """
    inherited = (getattr(DataLoader, name, None) for name in ("state_dict", "load_state_dict"))
    own = (getattr(type(data), name, None) for name in ("state_dict", "load_state_dict"))
    return has_state(data) and any(
        mine is None or mine is not theirs for mine, theirs in zip(own, inherited, strict=True)
    )


# --- changed copies


def with_sampler(loader: DataLoader[Any], **changes: object) -> DataLoader[Any]:
    """Return a copy of a loader with another ``batch_sampler`` or ``sampler``; a new loader would lose what subclasses add."""
    changed = copy.copy(loader)
    vars(changed).update(changes, _iterator=None)
    return changed


def independent(data: object) -> Any:
    """Return data whose iteration does not end an iteration of ``data`` in progress; a loader gets workers of its own."""
    if isinstance(data, DataLoader) and data.persistent_workers:
        data = copy.copy(data)
        data._iterator = None
    return data


def exchange_dataset(loader: DataLoader[Any], dataset: object, workers: object) -> tuple[Any, Any]:
    """Give a loader another data set, and the iterator whose persistent workers load from it; return its previous ones."""
    before = loader.dataset, loader._iterator
    vars(loader).update(dataset=dataset, _iterator=workers)
    return before


@contextmanager
def standing_in(loader: DataLoader[Any], name: str, indices: object) -> Iterator[None]:
    """Have iterators that begin inside take their indices from ``indices``; restore the loader afterwards."""
    sampler = getattr(loader, name)
    vars(loader)[name] = indices
    try:
        if workers_alive(loader):
            iterator: Any = loader._iterator
            iterator._index_sampler  # noqa: B018  # AttributeError if torch has renamed it
            iterator._index_sampler = indices
        yield
    finally:
        vars(loader)[name] = sampler


# --- iterators and their workers


def is_loader_iterator(data: object) -> bool:
    """Whether this is an iterator over a DataLoader."""
    return isinstance(data, _BaseDataLoaderIter)


def has_workers(batches: object) -> bool:
    """Whether an iterator has worker processes that can be ended at once."""
    return hasattr(batches, "_shutdown_workers")


def workers_alive(data: Any) -> bool:
    """Whether worker processes live on into the next epoch. torchdata keeps its iterator even without workers."""
    persistent = isinstance(data, DataLoader) and data.persistent_workers and data.num_workers
    return bool(persistent) and data._iterator is not None


def end_workers(data: Any, batches: Any = None) -> None:
    """End the worker processes of an iterator over a DataLoader, and those that the loader itself keeps."""
    for iterator in (batches, getattr(data, "_iterator", None)):
        if shutdown := getattr(iterator, "_shutdown_workers", None):
            shutdown()
    if getattr(data, "_iterator", None) is not None:
        data._iterator = None  # otherwise the loader would use the dead persistent workers again


def fetcher_of(batches: Iterator[Any]) -> ReferenceType[Any] | None:
    """Return the fetcher of a DataLoader's iterator without workers, which knows whether the samples have ended."""
    fetcher = getattr(batches, "_dataset_fetcher", None)
    return None if fetcher is None else ref(fetcher)


def has_ended(fetcher: ReferenceType[Any] | None) -> bool:
    """Whether the samples ended with the last, smaller batch; the data set may already have restarted."""
    return fetcher is not None and getattr(fetcher(), "ended", False)
