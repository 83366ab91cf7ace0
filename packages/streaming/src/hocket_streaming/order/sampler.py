"""The batch sampler of streams: global batches that are a pure function of seed, epoch, data and the size of a global batch."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import torch

from hocket.basics import launch_environment
from hocket.basics.seeding import check_seed
from hocket.data import Order
from hocket.errors import WrongType, WrongValue
from hocket_streaming.order.lanes import Passes
from hocket_streaming.order.mixing import Mixing


class Ordered(Protocol):
    """A data set that can be ordered: chunks that lie one after the other."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each chunk."""

    @property
    def identity(self) -> str:
        """A digest of the chunks."""

    def ahead(self, chunks: Sequence[int], at_once: int) -> None:
        """Fetch these chunks, which are needed in this order, instead of those asked for before.

        Args:
            at_once: how many chunks the ranks of this machine read from at a time.
        """


class GlobalOrder(Order):
    """Lists of samples for all ranks together: the same on any number of ranks and workers, from any position at once.

    Chunks are shuffled and dealt to lanes; a global batch has equally many samples of each lane, sorted by lane. A rank's
    contiguous part of it is whole lanes, so that ranks fetch different chunks. Samples are shuffled within a window of chunks
    of their lane.

    Args:
        datasets: one data set, or those of a mixture; samples are numbered through.
        batch_size: samples in a global batch. A Trainer sets it.
        seed: of the shuffle; None for ``torch.initial_seed()`` when an epoch begins: in a run the seed of the Trainer. In a
            loop of your own on several ranks give a seed, the same on all.
        lanes: at most so many; the largest number of those that divides ``batch_size`` is taken. None for 16, or a lane for 64
            samples of a global batch where these are more.
        window: chunks of a lane whose samples are shuffled among each other.
        shuffle: False for the order of the data, as evaluations want it.
        drop_last: whether an epoch ends before a batch of fewer samples.
        mixing: how the samples of a run are divided among the data sets; None for one data set.
        samples: in an epoch; None for those of one data set.

    Raises:
        ValueError: a number is not positive, or there is no sample.

    Example:
        >>> from hocket_streaming import GlobalOrder
        >>> class Numbers:
        ...     sizes, identity = [3, 3, 2], "numbers"
        ...     def ahead(self, chunks, at_once): pass
        >>> order = GlobalOrder([Numbers()], 4, seed=17)
        >>> order.set_epoch(3)
        >>> first, second = order
        >>> sorted(first + second), next(order.after(1)[0]) == second
        ([0, 1, 2, 3, 4, 5, 6, 7], True)
    """

    def __init__(
        self,
        datasets: Sequence[Ordered],
        batch_size: int,
        *,
        seed: int | None = None,
        lanes: int | None = None,
        window: int = 4,
        shuffle: bool = True,
        drop_last: bool = False,
        mixing: Mixing | None = None,
        samples: int | None = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "lanes": lanes, "window": window, "samples": samples}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise WrongValue(f"«{name}={value!r}» is not a number of {_UNITS[name]}. Write an int of 1 or more.")
        for name, flag in {"shuffle": shuffle, "drop_last": drop_last}.items():
            if not isinstance(flag, bool):
                raise WrongType(f"«{name}={flag!r}» is not a bool. Write True or False.")
        self.datasets, self.batch_size, self.seed = datasets, batch_size, check_seed(seed)
        self.window, self.shuffle, self.drop_last = window, shuffle, drop_last
        self._lanes, self._mixing = lanes, mixing
        self._sizes = [int(sum(each.sizes)) for each in datasets]
        self._offsets = [sum(self._sizes[:number]) for number in range(len(self._sizes))]
        if not all(self._sizes):
            raise WrongValue("The data set has no sample, so there is no order of them. Give another path.")
        self.samples = samples or sum(self._sizes)
        identities = "/".join(each.identity for each in datasets)
        self._digest = hashlib.blake2b(f"{identities} {mixing!r}".encode(), digest_size=6).hexdigest()
        self._epoch, self._told, self._rank, self._ranks = 0, False, 0, 1

    @property
    def lanes(self) -> int:
        """How many chunks are read beside each other, times `window`."""
        most = self._lanes or max(16, self.batch_size // 64)
        return next(number for number in range(min(most, self.batch_size), 0, -1) if not self.batch_size % number)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """What the order depends on besides seed, epoch and the size of a global batch."""
        how = (
            f"at most {self._lanes or 'auto'} lanes, a window of {self.window}"
            if self.shuffle
            else "in the order of the data"
        )
        seed = "the run's seed" if self.seed is None else f"seed {self.seed}"
        return f"{self.samples} samples of data {self._digest}, {how}, {seed}"

    def set_epoch(self, epoch: int) -> None:
        """Yield the batches of this epoch from now on. Until it is called, every iteration is the next epoch."""
        self._epoch, self._told = epoch, True

    def of_rank(self, rank: int, ranks: int) -> Self:
        """Return the same order for a process that loads part ``rank`` of ``ranks`` of each list."""
        own = copy.copy(self)
        own._rank, own._ranks = rank, ranks
        return own

    def lanes_of_rank(self) -> range:
        """Return the lanes whose samples this process loads; two ranks may share one."""
        return range(self.lanes * self._rank // self._ranks, -(-self.lanes * (self._rank + 1) // self._ranks))

    def __len__(self) -> int:
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        lists, _ = self.after(0)
        if not self._told:  # with the first list: a DataLoader may begin twice before it draws one
            self._epoch += 1
        yield from lists

    def after(self, skip: int) -> tuple[Iterator[list[int]], int]:
        """See :meth:`hocket.data.Order.after`; whatever ``skip`` is, it takes as long."""
        done = min(skip, len(self))
        return self._lists(torch.initial_seed() if self.seed is None else self.seed, self._epoch, done), done

    def _lists(self, seed: int, epoch: int, first: int) -> Iterator[list[int]]:
        lanes = self.lanes
        passes = [Passes(each.sizes, seed, each.identity, lanes, self.window, self.shuffle) for each in self.datasets]
        began, begun = epoch * self.samples, [-1] * len(passes)
        start = self._counts(began + first * self.batch_size)
        for number in range(first, len(self)):
            stop = self._counts(began + min((number + 1) * self.batch_size, self.samples))
            pieces: list[list[np.ndarray]] = [[] for _ in range(lanes)]
            for which, (one, offset) in enumerate(zip(passes, self._offsets, strict=True)):
                for lane, of_lane in enumerate(one.between(start[which], stop[which])):
                    pieces[lane] += [ids + offset for ids in of_lane]
                if one.blocks_begun != begun[which]:
                    begun[which] = one.blocks_begun
                    self._ahead(self.datasets[which], one, start[which])
            start = stop
            yield [sample for of_lane in pieces for ids in of_lane for sample in ids.tolist()]

    def _ahead(self, dataset: Ordered, one: Passes, position: int) -> None:
        lanes = self.lanes_of_rank() if self.shuffle else range(1)
        blocks = max(2, _AHEAD // (len(lanes) * self.window))
        here = launch_environment.current()
        ranks = min((here and here.local_world_size) or 1, self._ranks)
        at_once = -(-self.lanes * ranks // self._ranks) * self.window if self.shuffle else 1
        dataset.ahead(one.chunks_after(position, lanes, blocks), at_once)

    def _counts(self, position: int) -> tuple[int, ...]:
        return (position,) if self._mixing is None else self._mixing.counts(position)


#: Chunks that a data set is told of at least, where the rest of an epoch has so many.
_AHEAD = 32
_UNITS = {
    "batch_size": "samples",
    "lanes": "lanes",
    "window": "chunks",
    "samples": "samples of an epoch",
}


class RankSlice(Order):
    """This rank's part of each list of an order, for loops without a Trainer and without `hocket.Runtime`.

    Example:
        >>> from hocket_streaming import GlobalOrder, RankSlice
        >>> class Numbers:
        ...     sizes, identity = [4, 4], "numbers"
        ...     def ahead(self, chunks, at_once): pass
        >>> order = GlobalOrder([Numbers()], 4, seed=17)
        >>> parts = [list(RankSlice(order, rank, 2)) for rank in range(2)]
        >>> [one + two for one, two in zip(*parts)] == list(order)
        True
    """

    def __init__(self, order: GlobalOrder, rank: int, ranks: int) -> None:
        if not 0 <= rank < ranks:
            raise WrongValue(
                f"«rank={rank}» of «ranks={ranks}» is not possible. Ranks are numbered from 0 to ranks - 1."
            )
        if ranks > 1 and order.seed is None and order.shuffle:
            raise WrongValue(
                "«seed=None» may differ between ranks, which would read other samples. Write such as seed=17."
            )
        self._order, self._rank, self._ranks = order.of_rank(rank, ranks), rank, ranks

    def set_epoch(self, epoch: int) -> None:
        """Yield the lists of this epoch from now on."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._part, self._order)

    def __len__(self) -> int:
        return len(self._order)

    def after(self, skip: int) -> tuple[Iterator[list[int]], int]:
        """See :meth:`hocket.data.Order.after`."""
        lists, done = self._order.after(skip)
        return map(self._part, lists), done

    def _part(self, samples: list[int]) -> list[int]:
        size, left = divmod(len(samples), self._ranks)
        start = self._rank * size + min(self._rank, left)
        return samples[start : start + size + (self._rank < left)]
