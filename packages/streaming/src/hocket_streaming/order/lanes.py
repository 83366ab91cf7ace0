"""The order of one data set: chunks shuffled, dealt to lanes, and samples shuffled within a window of chunks.

It is a pure function of the sizes of the chunks, a key, the number of lanes and the window: any position is reached without the
positions before it. NumPy promises that the raw numbers of a bit generator stay the same between its versions (not those of
``permutation``), so an order is the positions of raw numbers of Philox, sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def shuffled(number: int, *key: object) -> Ids:
    """Return the numbers below ``number`` in an order that depends on the key alone.

    Example:
        >>> from hocket_streaming.order.lanes import shuffled
        >>> shuffled(5, 17, "epoch", 0).tolist() == shuffled(5, 17, "epoch", 0).tolist() != shuffled(5, 17, "epoch", 1).tolist()
        True
        >>> sorted(shuffled(5, "any").tolist())
        [0, 1, 2, 3, 4]
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(number)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class Block:
    """The samples of a window of chunks of one lane, which are read in the same stretch of time.

    Attributes:
        begin, end: its range of offsets in the lane.
        ids: the samples in their order, (end - begin,).
        chunks: the numbers of its chunks.
    """

    begin: int
    end: int
    ids: Ids
    chunks: Ids


class Pass:
    """One pass over a data set of ``n`` samples: position p is in lane ``p % lanes``, at offset ``p // lanes``.

    Chunks are shuffled and laid end to end; each lane is a stretch of that line, of ``n / lanes`` samples. A lane is read in blocks
    of ``window`` chunks, whose samples are shuffled among each other.

    Args:
        starts: the number of the first sample of each chunk, and after the last one the number of samples; (chunks + 1,).
        key: what the shuffle depends on besides; None keeps the order of the data, with one lane.
        lanes: how many chunks are read beside each other, times ``window``.
        window: chunks whose samples are shuffled among each other.
    """

    def __init__(self, starts: Ids, key: tuple[object, ...] | None, lanes: int = 1, window: int = 1) -> None:
        self._starts, self._key = starts, key
        self.samples = int(starts[-1])
        self.lanes = 1 if key is None else max(1, min(lanes, self.samples))
        self.window = window
        sizes = np.diff(starts)
        self._line: Ids = np.arange(len(sizes)) if key is None else shuffled(len(sizes), *key)
        #: Where each chunk of the line begins, in samples.
        self._edges: Ids = np.concatenate([[0], np.cumsum(sizes[self._line])])

    def length(self, lane: int) -> int:
        """Return the number of samples of a lane; lanes differ by at most one."""
        return (self.samples - lane + self.lanes - 1) // self.lanes

    def block(self, lane: int, offset: int) -> Block:
        """Return the block of a lane that has this offset."""
        each, more = divmod(self.samples, self.lanes)
        low = lane * each + min(lane, more)
        high = low + self.length(lane)
        first = int(np.searchsorted(self._edges, low, "right")) - 1
        here = int(np.searchsorted(self._edges, low + offset, "right")) - 1
        number = (here - first) // self.window
        begin = first + number * self.window
        end = min(begin + self.window, int(np.searchsorted(self._edges, high, "left")))
        pieces = []
        for place in range(begin, end):
            edge, chunk = int(self._edges[place]), int(self._line[place])
            start, stop = max(low, edge), min(high, int(self._edges[place + 1]))
            pieces.append(np.arange(start - edge, stop - edge) + self._starts[chunk])
        ids = np.concatenate(pieces)
        if self._key is not None:
            ids = ids[shuffled(len(ids), *self._key, lane, number)]
        start = max(low, int(self._edges[begin])) - low
        return Block(start, start + len(ids), ids, self._line[begin:end])


@dataclass
class Passes:
    """All passes over a data set, one after the other: position p of a run is position ``p % n`` of pass ``p // n``.

    Args:
        sizes: samples of each chunk.
        seed: of the run.
        identity: of the data set; another one has another order.
        shuffle: False for the order of the data.
    """

    sizes: Sequence[int]
    seed: int
    identity: str = ""
    lanes: int = 1
    window: int = 1
    shuffle: bool = True
    _passes: dict[int, Pass] = field(default_factory=dict, repr=False)
    _blocks: dict[int, tuple[int, Block]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._starts: Ids = np.concatenate([[0], np.cumsum(np.asarray(self.sizes, dtype=np.int64))])
        self.samples = int(self._starts[-1])

    def number(self, at: int) -> Pass:
        """Return a pass by its number; the latest two are kept."""
        if at not in self._passes:
            key = (self.seed, self.identity, at) if self.shuffle else None
            self._passes = dict(list(self._passes.items())[-1:]) | {
                at: Pass(self._starts, key, self.lanes, self.window)
            }
        return self._passes[at]

    def between(self, start: int, stop: int) -> list[list[Ids]]:
        """Return the samples at positions from ``start`` to before ``stop``, by lane, in pieces."""
        lanes: list[list[Ids]] = []
        while start < stop:
            at, begin = divmod(start, self.samples)
            end = min(begin + stop - start, self.samples)
            one = self.number(at)
            lanes += [[] for _ in range(one.lanes - len(lanes))]
            for lane in range(one.lanes):
                offset, last = -((lane - begin) // one.lanes), -((lane - end) // one.lanes)
                while offset < last:
                    block = self._block(one, at, lane, offset)
                    piece = block.ids[offset - block.begin : last - block.begin]
                    lanes[lane].append(piece)
                    offset += len(piece)
            start += end - begin
        return lanes

    def _block(self, one: Pass, at: int, lane: int, offset: int) -> Block:
        known = self._blocks.get(lane)
        if known is None or known[0] != at or not known[1].begin <= offset < known[1].end:
            known = self._blocks[lane] = at, one.block(lane, offset)
        return known[1]

    def chunks_after(self, position: int, lanes: range, blocks: int) -> list[int]:
        """Return the chunks that these lanes read from a position on, in the order in which they are needed.

        Args:
            lanes: of this process; lanes beyond those of the data set are left out.
            blocks: how many blocks of each lane.
        """
        wanted: list[tuple[int, int, Ids]] = []
        at, begin = divmod(position, self.samples)
        one = self.number(at)
        for lane in lanes:
            if lane >= one.lanes:
                continue
            offset = -((lane - begin) // one.lanes)
            for ahead in range(blocks):
                if offset >= one.length(lane):
                    break
                block = self._block(one, at, lane, offset) if not ahead else one.block(lane, offset)
                wanted.append((block.begin if ahead else 0, lane, block.chunks))
                offset = block.end
        ordered = sorted(wanted, key=lambda each: each[:2])
        return list(dict.fromkeys(int(chunk) for _, _, chunks in ordered for chunk in chunks))
