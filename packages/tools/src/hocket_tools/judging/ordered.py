"""Data in shards of consecutive batches, each of which one rank reads."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler, default_convert

from hocket.basics import seeding
from hocket.data import loaders
from hocket.data.adapters import CombinedLoaders, adapt
from hocket.data.batches import Padding
from hocket.data.checks import check_batches
from hocket.data.samplers import DRAWN
from hocket.data.source import Source
from hocket_tools.progress import say
from hocket_tools.reproducing import digests
from hocket_tools.reproducing.environment import data_of


class Sharded(CombinedLoaders):
    """The batches of a loader in shards of ``size`` consecutive ones, of which each of ``ranks`` reads every ranks-th.

    Shards that are ``done`` are not loaded from a DataLoader over a map-style data set; other data is read by every rank, which
    keeps the batches of its shards. A rank with fewer batches gets padding, so that all compute equally often. A loader that
    shuffles is read in the order of its data set.

    Args:
        data: any iterable of batches, the same on all ranks.
        size: batches of a shard.
        rank, ranks: which of how many readers this is.
        limit: the number of batches of the data, if it is less; None for all.
        share: a function that returns what rank 0 gives it on all ranks.
    """

    def __init__(
        self,
        data: Any,
        size: int,
        rank: int,
        ranks: int,
        limit: int | None = None,
        share: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        check_batches(data, "predict_into(data)")
        data = in_order(data, "the loader", rank)
        self.loaders: Mapping[str, Iterable[Any]] = {"data": data}
        #: The numbers of shards to omit, in ascending order.
        self.done: list[int] = []
        self._data, self._size, self._rank, self._ranks, self._limit = data, size, rank, ranks, limit
        #: What the loader's sampler yields for each batch; None if batches cannot be chosen.
        self.batches: list[Any] | None = None
        if loaders.by_index(data):
            self.batches = share(list(islice(getattr(data, loaders.sampler_name(data)), limit)))
        #: Number of batches, as far as they were counted.
        self.length = 0 if self.batches is None else len(self.batches)

    def __repr__(self) -> str:
        return f"Sharded(size={self._size}, done={len(self.done)}, limit={self._limit})"

    def __iter__(self) -> Iterator[Any]:
        return self._read()

    def prepared(self, prepare_data: Callable[..., Any], train: bool, global_batch: int | None) -> Source:
        """Return this rank's batches; the strategy does not divide them again."""
        return adapt(_Own(self), given=self._data)

    def samples(self) -> dict[str, Any]:
        """Return what identifies the data: its length, the contents of tensors in memory, and its first and last samples.

        Samples that are drawn, or that only a loop over the data reads, are omitted.
        """
        data = self._data.dataset if self.batches is not None else self._data
        known = {key: value for key, value in data_of(data).items() if key in ("batches", "fingerprint", "contents")}
        if "contents" not in known and known.get("batches") and hasattr(data, "__getitem__"):
            with suppress(Exception), seeding.preserved(devices=False):  # the loader raises it too, or reads otherwise
                first, again = (
                    [digests.digest(default_convert(data[at])) for at in (0, len(data) - 1)] for _ in range(2)
                )
                known |= {"ends": first} if first == again else {}
        return known

    def own(self, batch: int) -> bool:
        """Whether this rank reads the batch of this number."""
        shard = batch // self._size
        earlier = bisect.bisect_left(self.done, shard)
        return self.done[earlier : earlier + 1] != [shard] and (shard - earlier) % self._ranks == self._rank

    def _steps(self) -> int:
        """Return the number of batches of the rank that has most: the one that reads the first shard."""
        done = set(self.done)
        left = [each for each in range(-(-self.length // self._size)) if each not in done]
        sizes = [min(self._size, self.length - each * self._size) for each in left]
        return max((sum(sizes[rank :: self._ranks]) for rank in range(self._ranks)), default=0)

    def _read(self) -> Iterator[Any]:
        if self.batches is None:
            yield from self._read_all()
            return
        own = [each for number, each in enumerate(self.batches) if self.own(number)]
        padding = self._steps() - len(own)
        name = loaders.sampler_name(self._data)
        view = loaders.with_sampler(self._data, **{name: own + [*self.batches[:1]] * padding}, persistent_workers=False)
        iterator = iter(view)
        try:
            for number, batch in enumerate(iterator):
                yield batch if number < len(own) else Padding(batch)
        finally:
            loaders.end_workers(view, iterator)

    def _read_all(self) -> Iterator[Any]:
        self.length, own, batch = 0, 0, None
        for number, batch in enumerate(islice(self._data, self._limit)):
            self.length += 1
            if self.own(number):
                own += 1
                yield batch
        for _ in range(self._steps() - own):
            yield Padding(batch)


class _Own:
    """This rank's batches as an iterable that is not combined of loaders."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sharded)


def in_order(data: Any, said: str = "", rank: int = 0) -> Any:
    """Return the data; in place of a DataLoader that shuffles, one that reads the samples in the order of the data set.

    Args:
        said: what the loader is called when rank 0 says so; empty to say nothing.
    """
    if not loaders.by_index(data) or not isinstance(data.sampler, DRAWN):
        return data
    if said:
        say(f"{said} shuffles; samples are read in the order of the data set.", rank)
    sequence: Any = SequentialSampler(data.dataset)  # type: ignore[arg-type]
    batches = BatchSampler(sequence, data.batch_size, data.drop_last) if data.batch_size else None
    return loaders.with_sampler(data, sampler=sequence, batch_sampler=batches)
