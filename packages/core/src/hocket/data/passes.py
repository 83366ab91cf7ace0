"""Passes over the training data that begin anew, or in the middle, where a checkpoint was taken."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType

from torch.utils.data import DataLoader

from hocket.checkpoints.plain import decode, encode
from hocket.data.errors import DataError
from hocket.data.generators import DataGenerators
from hocket.data.global_batches import by_index, makeup
from hocket.data.indices import Indices
from hocket.data.prepared import Prepared, fetcher_of, skipped
from hocket.data.stateful import has_state
from hocket.data.workers import sheltered
from hocket.training import seeding


def length(data: Iterable[Any], limit: int | None = None) -> int | None:
    """Batches in one pass over ``data``, at most ``limit``, or None where the data does not say."""
    try:
        known = len(data)  # type: ignore[arg-type]  # that it may have none is what this is about
    except (TypeError, NotImplementedError):
        return None
    return known if limit is None else min(known, limit)


class Passes:
    """Begins passes over data, and says what has to be known to be in the middle of one again.

    How the middle is found, by what the data is (``kind``):

    - ``indices``, a DataLoader over a map-style data set: the indices of the pass are drawn again, from the random numbers
      that were there when it began, and those of past batches are left out. Nothing is loaded. Without workers a data set with
      ``state_dict`` and ``load_state_dict`` is told what it counted.
    - ``state``, anything else with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader over an
      IterableDataset, and a DataLoader without workers over one that has them: it is told.
    - ``list``: by index.
    - ``replay``, everything else: past batches are loaded again, and thrown away.

    Args:
        data: what this rank iterates: the user's data, or the strategy's share of it.
        given: the user's data.
    """

    def __init__(self, data: Iterable[Any], given: Any) -> None:
        self._data = data
        #: What is iterated in the end, of which ``data`` may be a share.
        self._source: Any = getattr(data, "loader", data)
        self._sources = DataGenerators(given)
        self.kind, self._stateful = _kind(self._source, given)
        #: What the indices of a pass are drawn from, besides random numbers.
        self._drawn = _drawn(given) if self.kind == "indices" else {}
        self._lasting = _lasting(self._source, self._stateful)
        #: Whether other ranks have other data, not other shares of the same.
        self.of_rank: bool = getattr(data, "of_rank", False)
        #: The random numbers that were there when this pass began, and when the persistent workers that live were started.
        self._start: dict[str, Any] | None = None
        self._workers: dict[str, Any] | None = None
        self._start_workers_like: dict[str, Any] | None = None
        self._indices: Indices | None = None
        #: What knows when the source ends, and whether it had ended before the checkpoint that this pass goes on from.
        self._fetcher: ReferenceType[Any] | None = None
        self._over = False
        self._warned = False

    def begin(self) -> Iterator[Any]:
        """A new pass."""
        self._over = False
        return self._iterate(None, 0)

    def state_dict(self, handed_out: int, under_way: bool) -> dict[str, Any]:
        """Where the data is, after so many batches of the pass under way, or between passes."""
        tree: dict[str, Any] = {
            "kind": self.kind,
            "of_rank": self.of_rank,
            "batches": length(self._source),
            "drawn": self._drawn,
            "global_batch": list(makeup(self._data)),
            "sources": self._sources.capture(),
            "workers": self._start_workers_like or self._workers,
        }
        over = under_way and self.kind == "state" and (self._over or _ended(self._source, self._fetcher))
        owner = self._stateful if under_way and not over else self._lasting
        if owner is not None:
            tree["own"] = encode(owner.state_dict(), "the data's state")
        self._warn_of_workers()
        if not under_way:
            return tree
        if self.kind == "replay" and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._source).__name__} cannot be asked where it is, so a resumed run reads the batches of the epoch "
                "under way again, and throws them away. Use a map-style data set, or data with state_dict and "
                "load_state_dict, such as torchdata's StatefulDataLoader.",
                stacklevel=2,
            )
        tree["start"] = self._start
        tree["over"] = over
        tree["read"] = self._data.read if self.of_rank else handed_out  # type: ignore[attr-defined]
        if self._indices is not None:
            tree |= {"first": self._indices.first, "asked": self._indices.asked, "ended": self._indices.ended}
        return tree

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Between passes: the next one begins as it would have."""
        self._sources.restore(tree["sources"])
        self._start_workers_like = tree["workers"]
        if self._lasting is not None and tree["kind"] == self.kind and "own" in tree:
            self._lasting.load_state_dict(decode(tree["own"]))

    def resume(self, tree: Mapping[str, Any], handed_out: int, skip: int) -> Iterator[Any]:
        """The rest of a pass of which ``handed_out`` batches are done.

        Args:
            skip: how many global batches the source has yielded; more than that, for an iterator that is never begun anew.

        Raises:
            DataError: the data is not what it was.
        """
        if tree["kind"] != self.kind:
            raise DataError(
                f"The pass over the training data that the checkpoint is in the middle of was over data of the kind "
                f"'{tree['kind']}', and {type(self._source).__name__} is of the kind '{self.kind}', so the place is not "
                "found in it. Resume with the data, and the loader, that the run began with."
            )
        if (then := tuple(tree["global_batch"])) != (made_of := makeup(self._data)):
            raise DataError(_other_global_batches(then, made_of))
        now = length(self._source)
        if tree["batches"] != now and None not in (tree["batches"], now):
            raise DataError(
                f"The training data had {tree['batches']} batches when the checkpoint was taken, in the middle of a pass, and "
                f"has {now} now. Resume with the same data set and batch size."
            )
        for what, then in tree.get("drawn", {}).items():
            if then != (given := self._drawn.get(what, then)) and None not in (then, given):
                raise DataError(
                    f"The {what} of the training data was {then} when the checkpoint was taken, in the middle of a pass, and "
                    f"is {given} now, so the samples that are left are not known. Resume with what the run began with, or "
                    "from the end of an epoch."
                )
        self._start_workers_like = tree["workers"]
        outside = seeding.capture()
        if tree["start"] is not None:
            _put(tree["start"], self._sources)
        self._over = tree.get("over", False)
        owner = self._lasting if self._over else self._stateful
        read_again = owner is not None and "own" in tree and not self._over and _partly_ended(decode(tree["own"]))
        if owner is not None and "own" in tree and not read_again:
            owner.load_state_dict(decode(tree["own"]))
        if self.of_rank and self.kind != "state":
            # A rank whose data has ended repeats its last batch, which is read again in case.
            skip += tree["read"] - handed_out
            self._data.hold = skip > 0  # type: ignore[attr-defined]
            skip = max(skip - 1, 0)
        if self._over:  # no worker is started for it
            self._start, batches = tree["start"], self._after(0)
        else:
            batches = self._iterate(tree, skip, read_again)
        if self.of_rank:
            self._data.read = tree["read"]  # type: ignore[attr-defined]
        if self._indices is not None:
            self._indices.begin()
            if self._indices.asked < skip:
                raise DataError(
                    f"{skip} batches of the pass over the training data are done, but its sampler yields "
                    f"{self._indices.asked} now. Resume with the same data set, sampler and batch size."
                )
        seeding.restore(outside)
        if self._indices is None or (self._indices.asked, self._indices.ended) == (tree["asked"], tree["ended"]):
            self._sources.restore(tree["sources"], samplers=False)
        else:  # there are other workers now, which are ahead by another number of batches
            self._sources.restore_data_set(tree["sources"])
        return batches

    def _iterate(self, resumed: Mapping[str, Any] | None, skip: int, read_again: bool = False) -> Iterator[Any]:
        self._start = _get(self._sources)
        alive = _persistent(self._source)
        like, self._start_workers_like = None if alive else self._start_workers_like, None
        if like is not None:
            # Persistent workers draw a seed when they start, which this pass would not have done.
            _put(like, self._sources)
        if self.kind == "indices":
            first = None if like is None else self._start
            batches = self._of_indices(first if resumed is None else resumed["first"], skip)
        else:
            self._indices = None
            batches = self._after(skip if self._stateful is None or read_again else 0)
            if like is not None:
                _put(self._start, self._sources)
        if not _persistent(self._source):
            self._workers = None  # they end with the pass
        elif not alive:
            self._workers = like or self._start
        return batches

    def _of_indices(self, first: dict[str, Any] | None, skip: int) -> Iterator[Any]:
        loader = self._source
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = Indices(getattr(loader, name), self._sources, first, skip)
        with _standing_in(loader, name, self._indices), sheltered(loader):
            return iter(self._data)

    def check_end(self, handed_out: int) -> None:
        """Raise DataError if the loader ended its pass before its sampler did: the data set raised StopIteration."""
        indices = self._indices
        if (
            self.kind != "indices" or indices is None or indices.asked <= handed_out
        ):  # padding batches were handed out too
            return
        raise DataError(
            f"The data ended after {handed_out} batches, though its sampler has more: {length(self._data) or 'more'} in all. "
            f"{type(self._source.dataset).__name__} raised StopIteration while it loaded a sample of the next one, as next() "
            "does for an exhausted iterator, and the DataLoader took that for the end. Catch it in __getitem__."
        )

    def workers_ended(self) -> None:
        """Persistent workers are gone."""
        self._workers = None

    def _warn_of_workers(self) -> None:
        loader = self._source
        if self._warned or self.kind != "indices" or not loader.num_workers or not has_state(loader.dataset):
            return
        self._warned = True
        warnings.warn(
            f"{type(loader.dataset).__name__} has a state_dict, but the {loader.num_workers} worker processes that load its "
            "samples cannot be asked for it, so a resumed run begins with the state that the data set is made with. Use "
            "num_workers=0, or let samples depend on their index and the epoch only, of which set_epoch is told.",
            stacklevel=3,
        )

    def _after(self, skip: int) -> Iterator[Any]:
        """The data after the first ``skip`` batches of its source, or what is left where that has ended."""
        data = self._data
        if data is not self._source:  # a share: it reads the source itself
            data.skip, data.over = skip, self._over  # type: ignore[attr-defined]
            skip = 0
        elif self._over:
            return iter(())
        with sheltered(self._source):
            batches = iter(data)
        self._fetcher = data.fetcher if isinstance(data, Prepared) else fetcher_of(batches)
        return skipped(batches, skip)


def _persistent(source: Any) -> bool:
    """Whether there are workers that go on with the next pass. torchdata's loader keeps its iterator without any, too."""
    workers = isinstance(source, DataLoader) and source.persistent_workers and source.num_workers
    return bool(workers) and source._iterator is not None


@contextmanager
def _standing_in(loader: Any, name: str, indices: Indices) -> Iterator[None]:
    """What begins inside takes its indices from ``indices``; the loader itself is as before afterwards."""
    sampler = getattr(loader, name)
    # Past DataLoader.__setattr__, which forbids this because an iterator under way would not notice: it need not.
    vars(loader)[name] = indices
    if _persistent(loader):
        loader._iterator._index_sampler = indices
    try:
        yield
    finally:
        vars(loader)[name] = sampler


def _other_global_batches(then: tuple[int, str], now: tuple[int, str]) -> str:
    """What to say where a pass was over global batches that were made of something else."""
    (number, unit), (given, of) = then, now
    if unit == "samples":
        advice = f"Pass global_batch={number} to the Trainer"
    elif number > 1:
        advice = f"Start {number} ranks, without global_batch"
    else:
        advice = "Pass global_batch= with the number of samples that a batch of the data has"
    return (
        f"The checkpoint was taken in the middle of an epoch, in which a global batch was made of {number} {unit}; now it is "
        f"made of {given} {of}. {advice}, or resume from the end of an epoch."
    )


def _get(sources: DataGenerators) -> dict[str, Any]:
    return {"global": seeding.to_tree(seeding.capture(devices=False)), "sources": sources.capture()}


def _put(start: Mapping[str, Any], sources: DataGenerators) -> None:
    seeding.restore(seeding.from_tree(start["global"]))
    sources.restore(start["sources"])


def _drawn(given: Any) -> dict[str, int | str | None]:
    """What has to be the same for the indices of a pass to be drawn again, as far as the user's loader says."""
    samplers = [getattr(given, name, None) for name in ("batch_sampler", "sampler")]
    names = [type(sampler).__qualname__ for sampler in samplers if sampler is not None]
    return {"length": length(getattr(given, "dataset", ())) or None, "sampler": " of ".join(names) or None}


def _kind(source: Any, given: Any) -> tuple[str, Any]:
    """How the middle of a pass is found, and who is asked for a state."""
    if by_index(source):  # one with a state, too: it would not know that it is shared over ranks
        dataset = getattr(given, "dataset", source.dataset)  # not what algorithms show it through
        return "indices", dataset if not source.num_workers and has_state(dataset) else None
    if has_state(source):
        return "state", source
    if isinstance(source, list | tuple):
        return "list", None
    if isinstance(source, DataLoader) and not source.num_workers and has_state(source.dataset):
        return "state", source.dataset
    return "replay", None


def _torchdatas(source: Any) -> bool:
    """Whether this is torchdata's StatefulDataLoader."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(source, torchdata.StatefulDataLoader)


def _lasting(source: Any, stateful: Any) -> Any:
    """Who knows between passes where the data goes on, or None where every pass begins alike.

    torchdata's loader knows where a pass is, and begins one when it is asked between two; what goes on is its data set, or
    with workers, which end with the pass, nothing.
    """
    if not _torchdatas(source) or stateful is not source:
        return stateful
    return source.dataset if not source.num_workers and has_state(source.dataset) else None


def _partly_ended(own: Any) -> bool:
    """Whether this is the state of a StatefulDataLoader of which some workers have ended and others not.

    Loaded, it would have those that ended yield their samples again (seen with torchdata 0.11).
    """
    snapshot = own.get("_snapshot") if isinstance(own, dict) else None
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, dict) else None
    ended = {bool((each.get("fetcher_state") or {}).get("fetcher_ended")) for each in (workers or {}).values()}
    return len(ended) == 2


def _ended(source: Any, fetcher: ReferenceType[Any] | None) -> bool:
    """Whether what a loader iterates ended with its last batch, a smaller one.

    It may have begun anew by then: told where it is, it would yield another pass.
    """
    if _torchdatas(source) and source.num_workers:
        workers = source.state_dict()["_snapshot"]["_worker_snapshots"].values()
        return all(worker["fetcher_state"]["fetcher_ended"] for worker in workers)
    return fetcher is not None and getattr(fetcher(), "ended", False)
