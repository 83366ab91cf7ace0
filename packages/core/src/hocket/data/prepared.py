"""Data as one rank iterates it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from hocket.data.errors import DataError
from hocket.data.indices import pass_over


def skipped(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """The same iterator after ``skip`` items. Raises DataError if there are fewer."""
    done = pass_over(batches, skip)
    if done < skip:
        raise DataError(
            f"{skip} batches of the pass over the training data are done, but it yields {done} now. Resume with the same data."
        )
    return batches


def fetcher_of(batches: Iterator[Any]) -> ReferenceType[Any] | None:
    """What the iterator of a DataLoader without workers loads samples with, as long as it lives. It knows when they end."""
    fetcher = getattr(batches, "_dataset_fetcher", None)
    return None if fetcher is None else ref(fetcher)


class Prepared:
    """Batches made from the user's data, of which can still be asked what that says about itself.

    Subclasses define ``_shared``, and where a global batch is made of several batches ``_whole``.
    """

    #: What makes a global batch, for those who continue a pass: so many ``"samples"``, or ``"batches"`` of the data.
    makeup: tuple[int, str] = (1, "batches")
    #: How many global batches the next pass leaves out; TrainingIterator says so where it cannot leave out their indices.
    skip = 0
    #: Whether nothing is left of the next pass, and it is ended without the data being read.
    over = False
    #: Of the data's own iterator in the latest pass; see `fetcher_of`.
    fetcher: ReferenceType[Any] | None = None

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        # The data's own pass begins here and not with the first batch: TrainingIterator begins it in the middle.
        skip, over, self.skip, self.over = self.skip, self.over, 0, False
        batches = iter(()) if over else iter(self._data)
        self.fetcher = self._data.fetcher if isinstance(self._data, Prepared) else fetcher_of(batches)
        return self._shared(skipped(self._whole(batches), skip))

    def _whole(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Global batches, from batches of the data."""
        return batches

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """What is handed out, from global batches."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # TypeError is what len() raises if it has none

    def __getattr__(self, name: str) -> Any:
        # TrainingIterator asks for set_epoch, sampler, dataset. Dunders and _data would recurse while copying or unpickling.
        if name.startswith("__") or name == "_data":
            raise AttributeError(name)
        return getattr(self._data, name)

    @property
    def loader(self) -> Any:
        """What is iterated: for a DataLoader this rank's own one, whose data set may be exchanged."""
        return getattr(self._data, "loader", self._data)

    @property
    def _iterator(self) -> Any:
        """The iterator that a DataLoader with persistent workers keeps; TrainingIterator ends it."""
        return getattr(self._data, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._data._iterator = value  # type: ignore[attr-defined]  # read from there, so it is there
