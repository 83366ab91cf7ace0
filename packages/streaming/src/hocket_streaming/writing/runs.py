"""Sort encoded samples on disk with bounded memory: runs, which are sorted in memory, and the merge of ranges of them.

A shuffle is a sort by random 64-bit keys that depend on the seed, the part of the source and the number of the sample in it, so
it is a uniform permutation, the same for any number of processes and after a restart. Without a shuffle keys are these numbers.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.basics.safe_files import replacing

Keys = NDArray[np.uint64]
#: Samples of a part at most: without a shuffle, a key is the part times this number plus the number of the sample.
_PART = 1 << 40
#: Bytes of memory that a sample takes in Python beside its content.
_OBJECT = 64


def keys_of(part: int, shuffle: bool, seed: int) -> Iterator[int]:
    """Yield the keys of the samples of a part."""
    if not shuffle:
        yield from range(part * _PART, (part + 1) * _PART)
    digest = hashlib.blake2b(repr((seed, part)).encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    while True:  # NumPy promises that raw numbers stay the same between versions
        yield from bits.random_raw(4096).tolist()


def write_runs(samples: Iterable[bytes], keys: Iterator[int], folder: Path, part: int, memory: int) -> list[str]:
    """Write the samples of a part as sorted runs of at most ``memory`` bytes, and return the names of the files."""
    names: list[str] = []
    numbers: list[int] = []
    batch: list[bytes] = []
    size = 0

    def flush() -> None:
        name = f"run-{part:06}-{len(names):05}"
        _write_run(folder / name, np.array(numbers, np.uint64), batch)
        names.append(name)

    for sample in samples:
        batch.append(sample)
        numbers.append(next(keys))
        size += len(sample) + _OBJECT
        if size > memory:
            flush()
            numbers, batch, size = [], [], 0
    if batch:
        flush()
    return names


def _write_run(path: Path, keys: Keys, samples: Sequence[bytes]) -> None:
    order = np.argsort(keys, kind="stable")
    offsets = np.zeros(len(samples) + 1, np.uint64)
    np.cumsum([len(samples[each]) for each in order], out=offsets[1:])
    with replacing(path) as file:
        file.write(np.uint64(len(samples)).tobytes() + keys[order].tobytes() + offsets.tobytes())
        for each in order:
            file.write(samples[each])


class Run:
    """A file of sorted samples; its keys are mapped, not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.samples = int(np.frombuffer(mapped, np.uint64, 1)[0])
        self.keys: Keys = np.frombuffer(mapped, np.uint64, self.samples, 8)
        self.offsets: Keys = np.frombuffer(mapped, np.uint64, self.samples + 1, 8 + 8 * self.samples)
        self._start = 16 + 16 * self.samples

    def range(self, low: int, high: int) -> slice:
        """Return the numbers of the samples with keys from ``low`` to before ``high``."""
        begin = int(np.searchsorted(self.keys, np.uint64(low)))
        end = self.samples if high > _LAST else int(np.searchsorted(self.keys, np.uint64(high)))
        return slice(begin, end)

    def read(self, numbers: slice) -> list[bytes]:
        """Return samples by their numbers."""
        offsets = self.offsets[numbers.start : numbers.stop + 1].astype(np.int64)
        with self._path.open("rb") as file:
            file.seek(self._start + int(offsets[0]))
            content = file.read(int(offsets[-1] - offsets[0]))
        edges = (offsets - offsets[0]).tolist()
        return [content[begin:end] for begin, end in pairwise(edges)]


_LAST = (1 << 64) - 1
#: Keys that are sorted at a time where runs are merged.
_BLOCK = 1 << 20


def merge(runs: Sequence[Run], path: Path, memory: int) -> None:
    """Write the samples of several runs as one."""
    with replacing(path) as file:
        file.write(np.uint64(sum(run.samples for run in runs)).tobytes())
        for keys, _ in merged(runs, _BLOCK):
            file.write(keys.tobytes())
        end = np.uint64(0)
        file.write(end.tobytes())
        for _, sizes in merged(runs, _BLOCK):
            ends = end + np.cumsum(sizes, dtype=np.uint64)
            file.write(ends.tobytes())
            end = ends[-1] if len(ends) else end
        for wanted in ranges(runs, Filling(memory)):
            file.writelines(read(runs, wanted))


class Range(NamedTuple):
    """The samples of one file that is to be written: those with keys from ``low`` to before ``high``.

    Attributes:
        skip: bytes of the first samples that belong to the file before; only where samples are cut.
        size: bytes of the samples.
        samples: how many they are; those that are cut count in the file where they begin.
    """

    low: int
    high: int
    skip: int
    size: int
    samples: int


def merged(runs: Sequence[Run], most: int) -> Iterator[tuple[Keys, Keys]]:
    """Yield the keys and sizes of all samples in the order of the keys, in blocks of about ``most``."""
    step = max(1, most // (2 * len(runs) + 2))
    marks = np.sort(np.concatenate([run.keys[step - 1 :: step] for run in runs]))[:: max(1, most // (2 * step))]
    edges = [0, *(int(mark) for mark in np.unique(marks) if mark), _LAST + 1]
    for low, high in pairwise(edges):
        numbers = [run.range(low, high) for run in runs]
        keys = np.concatenate([run.keys[each] for run, each in zip(runs, numbers, strict=True)])
        sizes = np.concatenate(
            [np.diff(run.offsets[each.start : each.stop + 1]) for run, each in zip(runs, numbers, strict=True)]
        )
        order = np.argsort(keys, kind="stable")
        yield keys[order], sizes[order]


@dataclass
class Filling:
    """How samples are divided into files.

    Args:
        size: bytes of a file at most.
        empty: bytes of a file without samples.
        beside: bytes of a file for each sample beside those of the sample.
        cut: whether a file is filled exactly, and samples are cut at its end.
    """

    size: int
    empty: int = 0
    beside: int = 0
    cut: bool = False


def ranges(runs: Sequence[Run], filling: Filling, most: int = _BLOCK) -> list[Range]:
    """Return which samples belong to which file. It reads keys and sizes, about ``most`` of them at a time."""
    if not runs:
        return []
    return list(_cut(merged(runs, most), filling) if filling.cut else _filled(merged(runs, most), filling))


def _filled(blocks: Iterator[tuple[Keys, Keys]], filling: Filling) -> Iterator[Range]:
    low, size, count = 0, 0, 0
    room = filling.size - filling.empty
    for keys, sizes in blocks:
        ends = np.cumsum(sizes + np.uint64(filling.beside)).astype(np.int64)
        at = 0
        while at < len(keys):
            before = int(ends[at - 1]) if at else 0
            stop = int(np.searchsorted(ends, before + room - size, "right"))
            stop = max(stop, at + (not count))  # a sample that is larger than a file has one of its own
            while 0 < stop < len(keys) and keys[stop] == keys[stop - 1]:  # once in 2 ** 64 times the samples
                stop += 1
            if stop > at:
                size += int(ends[stop - 1]) - before
                count += stop - at
            if stop < len(keys):
                yield Range(low, int(keys[stop]), 0, size - count * filling.beside, count)
                low, size, count = int(keys[stop]), 0, 0
            at = stop
    if count:
        yield Range(low, _LAST + 1, 0, size - count * filling.beside, count)


def _cut(blocks: Iterator[tuple[Keys, Keys]], filling: Filling) -> Iterator[Range]:
    low, skip, count, done = 0, 0, 0, 0  # of the file that is filled; bytes before this block
    total, begun = 0, 0
    for keys, sizes in blocks:
        sizes = sizes.astype(np.int64)
        ends = done + np.cumsum(sizes)
        counted = 0
        while len(keys) and ends[-1] > begun + filling.size:
            begun += filling.size
            here = int(np.searchsorted(ends, begun, "right"))  # the sample that has the first byte of the next file
            first = int(np.searchsorted(keys, keys[here], "left"))
            begins = int(ends[first - 1]) if first else done
            whole_here = here + (int(ends[here] - sizes[here]) < begun)  # it counts where it begins
            yield Range(low, int(keys[here]) + 1, skip, filling.size, count + whole_here - counted)
            low, skip, count, counted = int(keys[here]), begun - begins, 0, whole_here
        count += len(keys) - counted
        done = total = int(ends[-1]) if len(keys) else done
    if total > begun:
        yield Range(low, _LAST + 1, skip, total - begun, count)


def read(runs: Iterable[Run], wanted: Range) -> list[bytes]:
    """Return the samples of a file in their order, those at its ends cut if they have to be."""
    keys: list[Keys] = []
    samples: list[bytes] = []
    for run in runs:
        numbers = run.range(wanted.low, wanted.high)
        keys.append(run.keys[numbers])
        samples += run.read(numbers)
    order = np.argsort(np.concatenate(keys), kind="stable") if keys else ()
    sorted_samples = [samples[each] for each in order]
    if not wanted.skip and sum(map(len, sorted_samples)) == wanted.size:
        return sorted_samples
    return [b"".join(sorted_samples)[wanted.skip : wanted.skip + wanted.size]]
