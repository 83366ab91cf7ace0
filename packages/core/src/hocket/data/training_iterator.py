"""The training data as the loop takes it: batch by batch, one pass after another, across fits."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from hocket.data.batches import Padding, unpadded
from hocket.data.errors import DataError
from hocket.data.passes import Passes, length
from hocket.data.prepared import skipped

_ENDLESS = (itertools.cycle, itertools.repeat, itertools.count)


def iterates_once(data: Any) -> bool:
    """Whether data certainly cannot be iterated anew: a generator, or an iterator of Python itself or of a DataLoader."""
    if not isinstance(data, Iterator):
        return False
    return isinstance(data, Generator | _BaseDataLoaderIter) or type(data).__module__ in ("builtins", "itertools")


@contextmanager
def one_pass(data: Iterable[Any], passes: Passes | None = None) -> Iterator[Iterator[Any]]:
    """An iterator over ``data``, of ``passes`` if given; what raises inside ends worker processes of a DataLoader at once.

    Left to the garbage collector, they would hold up the process for five seconds each.
    """
    batches = iter(data) if passes is None else passes.begin()
    try:
        yield batches
    except BaseException:
        end_workers(data, batches)
        raise


def end_workers(data: Any, batches: Iterator[Any] | None = None) -> None:
    """End the worker processes of an iterator over a DataLoader, and those that the loader itself keeps."""
    for iterator in (batches, getattr(data, "_iterator", None), getattr(batches, "_base_iter", None)):
        if shutdown := getattr(iterator, "_shutdown_workers", None):
            shutdown()
    if getattr(data, "_iterator", None) is not None:
        data._iterator = None  # else persistent workers that are gone are asked again


class TrainingIterator:
    """Hands out batches; a pass that a fit leaves unfinished is continued by the next, in another process too.

    Args:
        data: any iterable of batches that can be iterated once an epoch.
        limit: at most so many batches an epoch.
        overfit: keep the first so many batches and repeat only them, in the same order.
        given: the user's data, where ``data`` is a strategy's share of it.
    """

    def __init__(
        self, data: Iterable[Any], limit: int | None = None, overfit: int | None = None, given: Any = None
    ) -> None:
        self._data = list(itertools.islice(data, overfit)) if overfit else data
        self._passes = Passes(self._data, data if given is None else given)
        self._limit, self._overfit = limit, overfit
        self._batches: Iterator[Any] | None = None
        self._handed_out = 0
        self._source = getattr(data, "loader", data)  # a strategy's share of the user's
        self._once = isinstance(self._source, Iterator)
        self._read = 0  # batches of earlier passes
        #: A batch that was handed out and not trained on.
        self._back: tuple[Any, bool] | None = None
        #: Whether the data raised an exception, which its iterator may not survive.
        self._failed = False
        #: Why the epoch in progress cannot be continued, if so.
        self._lost = ""
        #: The place that a checkpoint says, until it is gone to.
        self._place: Mapping[str, Any] | None = None
        #: Batches in a pass, or None while that is not known; learned from the first pass that ends.
        self.length = length(self._data, limit)

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        in_place = self._place is not None and self._place["under_way"]
        return self._batches is not None or in_place or bool(self._lost)

    @property
    def endless(self) -> bool:
        """Whether the data certainly never ends; not every endless iterable can be told."""
        return isinstance(self._source, _ENDLESS) and self._limit is None and not self._overfit

    def check(self, epochs: float, batches: float) -> None:
        """Raise DataError for so many more epochs, or batches, of data that can be iterated once and has fewer."""
        once = iterates_once(self._source) and not self.endless and self._limit is None and not self._overfit
        if once and (epochs > 1 or batches > length_hint(self._source, sys.maxsize)):
            raise DataError(
                f"The training data ({type(self._source).__name__}) is an iterator, which can be iterated once, and the fit "
                "would need it for longer. Pass what it iterates over, such as the list or the DataLoader itself."
            )

    def start(self, epoch: int) -> None:
        """Begin a pass; samplers and data sets that want to know the epoch are told (``set_epoch``)."""
        self._tell(epoch)
        self._batches = self._passes.begin()
        self._handed_out = 0

    def go_on(self, epoch: int) -> None:
        """Be in the middle of the pass that `load_state_dict` was told of; nothing to do for one that began here.

        Raises DataError where the data is not what it was.
        """
        if self._lost:
            raise DataError(self._lost)
        place, self._place = self._place, None
        if place is None:
            return
        self._tell(epoch)
        self._handed_out = place["handed_out"]
        self._batches = self._passes.resume(place["pass"], self._handed_out, self._read + self._handed_out)

    def _tell(self, epoch: int) -> None:
        told: set[int] = set()
        for owner in (
            self._data,
            *(getattr(self._data, name, None) for name in ("batch_sampler", "sampler", "dataset")),
        ):
            for candidate in (owner, getattr(owner, "sampler", None), getattr(owner, "dataset", None)):
                set_epoch = getattr(candidate, "set_epoch", None)
                if callable(set_epoch) and id(candidate) not in told:
                    told.add(id(candidate))
                    set_epoch(epoch)

    def next(self) -> tuple[Any, bool] | None:
        """The next batch, and whether it counts (see `Padding`); None at the end of the pass."""
        assert self._batches is not None, "start comes first"
        if self._back is not None:
            again, self._back = self._back, None
            return again
        if self._handed_out != self._limit:
            try:
                for batch in self._batches:
                    self._handed_out += 1
                    return unpadded(batch) if type(batch) is Padding else (batch, True)
            except BaseException:
                self._failed = True
                raise
            self._passes.check_end(self._handed_out)
        if not self._handed_out:
            self.close()
            raise DataError(self._nothing())
        self.length = self._handed_out
        self._read += self._handed_out if self._once else 0
        # An iterator that goes on where the last pass was cut off is what some people mean by an epoch of a stream.
        self._batches = None
        return None

    def put_back(self, handed_out: tuple[Any, bool]) -> None:
        """Return the batch that :meth:`next` returned last once more."""
        self._back = handed_out

    def leave(self) -> None:
        """End worker processes, and an iterator that has raised; :meth:`go_on` continues the epoch as in another process."""
        failed, self._failed, back = self._failed, False, self._back
        workers: Any = getattr(self._source, "num_workers", 0)
        if self._lost or not (failed or workers):
            return
        kind = type(self._source).__name__
        if self._once:
            why = f"The training data ({kind}) is an iterator, which cannot be asked again for the batch after which it raised."
            place = None
        else:
            try:
                place = self.state_dict()
            except Exception as error:
                place = None
                why = f"The training data ({kind}) does not say where it is after an exception: {error}."
        self.close()
        if place is None:
            self._lost = (
                f"{why} Pass data that starts anew: fit(train_data=…), or resume from a checkpoint in a new Trainer."
            )
        else:
            self.load_state_dict(place)
            self._back = back

    def close(self) -> None:
        """Forget the pass under way and end the worker processes of a DataLoader that iterates."""
        batches, self._batches, self._place, self._back, self._lost = self._batches, None, None, None, ""
        end_workers(self._data, batches)
        self._passes.workers_ended()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where the data is, as a tree; of this rank."""
        if self._place is not None:
            return dict(self._place)
        under_way = self._batches is not None
        return {
            "under_way": under_way,
            "handed_out": self._handed_out if under_way else 0,
            "read": self._read,
            "length": self.length,
            "pass": self._passes.state_dict(self._handed_out, under_way),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`: `go_on` continues the pass that was under way, or the next one begins as it would have."""
        self.close()
        self._read, self.length = tree["read"], tree["length"] if self.length is None else self.length
        if tree["under_way"]:
            self._place = tree
        else:
            self._passes.restore(tree["pass"])
            if isinstance(self._source, Iterator) and "own" not in tree["pass"]:
                skipped(iter(self._data), self._read)

    def _nothing(self) -> str:
        kind = type(self._source).__name__
        if self._once:
            return (
                f"The training data ({kind}) yielded no batch: it is an iterator, which can be iterated once, and it is "
                "exhausted. Pass something that starts anew each time, such as a list or a DataLoader."
            )
        return (
            f"The training data ({kind}) yielded no batch. Check that the data set is not empty, and that drop_last=True "
            "does not drop its only batch."
        )
