"""The order of one data set: chunks shuffled, dealt to lanes, and samples shuffled within a window of chunks.

It is a pure function of the sizes of the chunks, a key, the number of lanes and the window: any position is reached without the
positions before it. NumPy promises that the raw numbers of a bit generator stay the same between its versions (not those of
``permutation``), so an order is the positions of raw numbers of Philox, sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Block(NamedTuple):
    """A window of chunks of one lane, which are read in the same stretch of time.

    Attributes:
        number: of the block in its lane.
        begin, end: its range of offsets in the lane.
        places: of its chunks in the line of all chunks.
    """

    number: int
    begin: int
    end: int
    places: range


class Pass:
    """One pass over a data set of ``n`` samples: position p is in lane ``p % lanes``, at offset ``p // lanes``.

    Chunks are shuffled and laid end to end; each lane is a stretch of that line, of ``n / lanes`` samples. A lane is read in
    blocks of ``window`` chunks, whose samples are shuffled among each other.

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
        low = self._low(lane)
        high = low + self.length(lane)
        first = self._place(low)
        number = (self._place(low + offset) - first) // self.window
        begin = first + number * self.window
        end = min(begin + self.window, self._place(high - 1) + 1)
        edges = self._edges
        return Block(number, max(0, int(edges[begin]) - low), min(high, int(edges[end])) - low, range(begin, end))

    def ids(self, lane: int, block: Block) -> Ids:
        """Return the samples of a block in their order; (end - begin,)."""
        low = self._low(lane)
        pieces = []
        for place in block.places:
            edge = int(self._edges[place])
            start, stop = max(low + block.begin, edge), min(low + block.end, int(self._edges[place + 1]))
            pieces.append(np.arange(start - edge, stop - edge) + self._starts[self._line[place]])
        ids = np.concatenate(pieces)
        return ids if self._key is None else ids[shuffled(len(ids), *self._key, lane, block.number)]

    def chunks(self, block: Block) -> list[int]:
        """Return the numbers of the chunks of a block."""
        return [int(chunk) for chunk in self._line[block.places.start : block.places.stop]]

    def _low(self, lane: int) -> int:
        each, more = divmod(self.samples, self.lanes)
        return lane * each + min(lane, more)

    def _place(self, sample: int) -> int:
        return int(np.searchsorted(self._edges, sample, "right")) - 1


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
    _blocks: dict[int, tuple[int, Block, Ids]] = field(default_factory=dict, repr=False)
    #: Increases when a lane begins another block.
    blocks_begun: int = field(default=0, init=False)

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
                    block, ids = self._block(one, at, lane, offset)
                    piece = ids[offset - block.begin : last - block.begin]
                    lanes[lane].append(piece)
                    offset += len(piece)
            start += end - begin
        return lanes

    def _block(self, one: Pass, at: int, lane: int, offset: int) -> tuple[Block, Ids]:
        known = self._blocks.get(lane)
        if known is None or known[0] != at or not known[1].begin <= offset < known[1].end:
            block = one.block(lane, offset)
            known = self._blocks[lane] = at, block, one.ids(lane, block)
            self.blocks_begun += 1
        return known[1:]

    def chunks_after(self, position: int, lanes: range, blocks: int) -> list[int]:
        """Return the chunks that some lanes read in a pass from a position on, in the order in which they are needed.

        Args:
            position: in samples, over all passes.
            blocks: of each lane, from the one at the position.
        """
        at, begin = divmod(position, self.samples)
        one = self.number(at)
        wanted: list[tuple[int, int, Block]] = []
        for lane in lanes:
            offset = -((lane - begin) // one.lanes)
            for ahead in range(blocks):
                if lane >= one.lanes or offset >= one.length(lane):
                    break
                block = one.block(lane, offset)
                wanted.append((offset if ahead else 0, lane, block))
                offset = block.end
        return list(dict.fromkeys(chunk for *_, block in sorted(wanted) for chunk in one.chunks(block)))
