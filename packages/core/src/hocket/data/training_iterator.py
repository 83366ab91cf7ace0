"""The training-data iterator: it yields batches, epoch after epoch, across fits."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from hocket.data.adapters import adapt, as_recorded
from hocket.data.batches import Padding, unpadded
from hocket.data.errors import DataError
from hocket.data.loaders import is_loader_iterator
from hocket.data.source import Source, empty, one_epoch
from hocket.help import warn

#: Types of data that never ends.
ENDLESS = (itertools.cycle, itertools.repeat, itertools.count)


def iterates_once(data: object) -> bool:
    """Whether data certainly cannot be iterated again: a generator, or an iterator of Python itself or of a DataLoader."""
    if not isinstance(data, Iterator):
        return False
    builtin = type(data).__module__ in ("builtins", "itertools")
    return isinstance(data, Generator) or is_loader_iterator(data) or builtin


class TrainingIterator:
    """Yield training batches. The next fit continues an unfinished epoch, in another process too.

    Args:
        source: the data of each epoch.
        limit: the maximum number of batches per epoch.
        overfit: train only on the first so many batches, in the same order every epoch.
        window: number of these batches that make one batch of training; see `hocket.data.Window`.
    """

    def __init__(self, source: Source, limit: int | None = None, overfit: int | None = None, window: int = 1) -> None:
        self._given = source.data
        #: With ``overfit``: the batches of every epoch.
        self._kept = list(itertools.islice(source.begin(), overfit)) if overfit else None
        if self._kept is not None:
            source.close()
            source = adapt(self._kept, given=self._given)
        self._source = source
        self._limit = limit
        self._window = window
        self._batches: Iterator[Any] | None = None
        self._handed_out = 0
        self._once = isinstance(source.data, Iterator)
        self._read = 0  # batches of earlier epochs, if the data is an iterator
        #: Batches that were returned by `next` and not trained on.
        self._back: list[tuple[Any, bool]] = []
        #: The source's position before `is_last` read a batch, if the source knows only that after it.
        self._before: Mapping[str, Any] | None = None
        #: Whether `next` has found the end of the epoch, and not ended it.
        self._ended = False
        #: Whether the data raised an exception, which its iterator may not survive.
        self._failed = False
        #: Why the current epoch cannot be continued; empty if it can.
        self._lost = ""
        #: The position of a checkpoint, until the epoch is resumed there.
        self._position: Mapping[str, Any] | None = None
        #: Number of the source's batches in an epoch, or None while it is unknown; set at the latest when an epoch ends.
        self._length = self._limited(source.length())
        #: The number of the first batch beyond what the data says; 0 if the length is unknown or was counted.
        self._too_many = 1 + (self._length or -1)

    def _warn_of_more(self) -> None:
        warn(
            f"The training data said that an epoch has {self._too_many - 1} batches, and there are more. Schedules were "
            "planned for fewer; correct its __len__, or that of its data set.",
        )
        self._too_many = 0

    @property
    def length(self) -> int | None:
        """Number of batches of training in an epoch, or None while it is unknown."""
        return None if self._length is None else -(-self._length // self._window)

    def _limited(self, length: int | None) -> int | None:
        return length if length is None or self._limit is None else min(length, self._limit)

    @property
    def in_progress(self) -> bool:
        """Whether an epoch has begun and not ended."""
        to_resume = self._position is not None and self._position["under_way"]
        return self._batches is not None or to_resume or bool(self._lost)

    @property
    def endless(self) -> bool:
        """Whether the data certainly never ends; not every endless iterable can be recognized."""
        return isinstance(self._source.data, ENDLESS) and self._limit is None

    def check(self, epochs: float, batches: float) -> None:
        """Raise DataError if the data can be iterated only once, and has fewer than so many more epochs or batches."""
        data = self._source.data
        once = iterates_once(data) and not self.endless and self._limit is None
        if once and (epochs > 1 or (batches - 1) * self._window >= length_hint(data, sys.maxsize)):
            raise DataError(
                f"The training data ({type(data).__name__}) is an iterator, which can be iterated once, and the fit "
                "would need it for longer. Pass what it iterates over, such as the list or the DataLoader itself."
            )

    def start(self, epoch: int) -> None:
        """Begin an epoch."""
        self._batches = self._source.begin(epoch)
        self._handed_out, self._ended = 0, False

    def resume(self, epoch: int) -> None:
        """Continue the epoch of the position given to `load_state_dict`. Does nothing for an epoch that began here.

        Raises DataError if the data has changed.
        """
        if self._lost:
            raise DataError(self._lost)
        position, self._position = self._position, None
        if position is None:
            return
        self._handed_out, self._ended = position["handed_out"], position.get("ended", False)
        if self._ended:
            self._source.restore({**position["pass"], "earlier": self._read + self._handed_out if self._once else 0})
            self._batches = iter(())
            return
        self._source = as_recorded(self._source, position["pass"]["kind"])
        self._batches = self._source.begin(epoch, {**position["pass"], "earlier": self._read})

    def next(self, ends: bool = True) -> tuple[Any, bool] | None:
        """Return the next batch, and whether it counts (see `Padding`); None at the end of the epoch.

        Args:
            ends: whether to end the epoch there, and not in a later call.
        """
        assert self._batches is not None, "start comes first"
        self._before = None
        if self._back:
            return self._back.pop(0)
        if self._handed_out != self._limit:
            try:
                for batch in self._batches:
                    self._handed_out += 1
                    if self._handed_out == self._too_many:
                        self._warn_of_more()
                    return unpadded(batch) if type(batch) is Padding else (batch, True)
            except BaseException as error:
                self._failed = True
                from hocket.help import failures  # only needed for error messages

                failures.explain(error, "collate")
                raise
            if not ends:
                self._batches, self._ended = iter(()), True
        if not ends:
            return None
        if not self._handed_out:
            self.close()
            raise self._empty()
        declared = self._limited(self._source.length())
        if not self._read and declared is not None and self._handed_out < declared == self._length:
            warn(
                f"The training data said that an epoch has {declared} batches, and it ended after {self._handed_out}. "
                "Schedules were planned for more; correct its __len__, or that of its data set."
            )
        self._length, self._too_many = self._handed_out, 0
        self._read += self._handed_out if self._once else 0
        # For an iterator over a stream, the next epoch continues where `limit` ended this one.
        self._batches = None
        return None

    def is_last(self) -> bool:
        """Whether no batch follows the latest in its epoch. If the length is unknown, the next one is read to know."""
        if self._batches is None or self._ended:
            return not self._back
        if self._back:
            return False
        if (length := self._limited(self._source.length())) is not None:
            return self._handed_out >= length
        from hocket.data.sources.replay import Replay

        before = None if isinstance(self._source, Replay) else self._source.position(self._handed_out)
        following = self.next(ends=False)
        if following is not None:
            self._back, self._before = [following], before
        return following is None

    @contextmanager
    def another_epoch(self, make: Callable[[], Source]) -> Iterator[Iterator[tuple[Any, bool]]]:
        """Yield an iterator over the batches of an epoch, as :meth:`next` would return them; training does not notice it.

        Args:
            make: returns a source of the same data that can be iterated beside the one that training iterates.
        """
        source = make() if self._kept is None else adapt(self._kept, given=self._given)
        position = source.position()
        try:
            with one_epoch(source) as batches:
                yield map(unpadded, itertools.islice(batches, self._limit))
        finally:
            source.close()
            source.restore(position)

    def indices(self) -> list[Any] | None:
        """Return the data set's indices of the samples in the batch that was returned last on this rank, or None if unknown."""
        known = getattr(self._source, "indices", None)
        return None if known is None or not self._handed_out else known(self._handed_out - 1 - len(self._back))

    def put_back(self, handed_out: Sequence[tuple[Any, bool]]) -> None:
        """Have :meth:`next` return its last batches again."""
        self._back = [*handed_out, *self._back]

    def suspend(self) -> None:
        """End worker processes, or an iterator that raised; :meth:`resume` continues the epoch as in another process."""
        failed, self._failed, back = self._failed, False, self._back
        ahead = int(self._before is not None)  # a batch that is read again
        data = self._source.data
        workers: Any = getattr(data, "num_workers", 0)
        if self._lost or not (failed or workers):
            return
        kind = type(data).__name__
        position = None
        if self._once:
            why = f"The training data ({kind}) is an iterator, which cannot be restarted after the exception that it raised."
        else:
            kept = back[: len(back) - ahead]
            self._back = back[len(kept) :]
            try:
                position = self.state_dict()
            except Exception as error:
                why = f"The position of the training data ({kind}) cannot be read after an exception: {error}."
        self.close()
        if position is None:
            self._lost = (
                f"{why} Pass data that starts anew: fit(train_data=…), or resume from a checkpoint in a new Trainer."
            )
        else:
            self.load_state_dict(position)
            self._back = kept

    def close(self) -> None:
        """Discard the current epoch and end the worker processes of a running DataLoader."""
        self._source.close()
        self._batches, self._position, self._back, self._lost = None, None, [], ""
        self._before = None

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position as a tree. Its keys keep their names for compatibility with older checkpoints."""
        if self._position is not None:
            return dict(self._position)
        in_progress, handed_out = self._batches is not None, self._handed_out - len(self._back)
        within = handed_out if in_progress and not self._ended else None
        return {
            "under_way": in_progress,
            "handed_out": handed_out if in_progress else 0,
            "read": self._read,
            "length": self._length,
            **({"ended": True} if in_progress and self._ended else {}),
            "pass": self._source.position(within) if self._before is None else self._before,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`: `resume` continues a current epoch; between epochs, the next one begins as it would have."""
        self.close()
        self._read, self._length = tree["read"], tree["length"] if self._length is None else self._length
        if tree["under_way"]:
            self._position = tree
        else:
            self._source.restore({**tree["pass"], "earlier": self._read if self._once else 0})

    def changed(self, tree: Mapping[str, Any]) -> str:
        """Return how the data differs from that of a state between epochs, from which the run continues; or empty.

        In the middle of an epoch `resume` refuses other data.
        """
        if tree["under_way"]:
            return ""
        changes = self._source.changed(tree["pass"]) if hasattr(self._source, "changed") else []
        if None not in (tree["length"], self._length) and tree["length"] != self._length:
            changes.append(f"an epoch had {tree['length']} batches, has {self._length}")
        return "; ".join(changes)

    def reshare(self, trees: Sequence[Mapping[str, Any]], ranks: int) -> Mapping[str, Any]:
        """Return this rank's position from those of a run with another world size; see :meth:`hocket.data.Source.reshare`."""
        return {**trees[0], "pass": self._source.reshare([tree["pass"] for tree in trees], ranks)}

    def _empty(self) -> DataError:
        if self._length and not self._once:  # of an earlier epoch
            return DataError(
                f"The training data ({type(self._given).__name__}) yielded no batch in this epoch, and {self._length} in the "
                "last one: its __iter__ returns the same iterator each time. Return a new one in each epoch, or pass a list or "
                "a DataLoader."
            )
        return empty(self._given, "The training data", "train_data")
