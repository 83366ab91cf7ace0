"""Read data in chunks as hocket-streaming does, without its cache: also in a process without torch."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any


def fetched(shards: Any, chunk: Any) -> bytes:
    """Return the bytes of a chunk as a store has them."""
    return b"".join(shards.files.read(part.file, part.start, part.size) for part in chunk.parts)


def of_chunk(shards: Any, chunk: Any, data: bytes, backwards: bool = False) -> list[Any]:
    """Return the samples of a chunk of which these bytes were fetched, in their order, read in this order or backwards."""
    inside = shards.open(chunk, memoryview(shards.unpack(chunk, data)).toreadonly())
    step = -1 if backwards else 1
    return [plain(shards.get(inside, row)) for row in range(chunk.samples)[::step]][::step]


def samples(shards: Any, chunks: Iterable[Any], backwards: bool = False) -> list[Any]:
    """Return the samples of some chunks in their order, read in this order or backwards."""
    step = -1 if backwards else 1
    read = [of_chunk(shards, chunk, fetched(shards, chunk), backwards) for chunk in list(chunks)[::step]]
    return [sample for of_one in read[::step] for sample in of_one]


def plain(value: Any) -> Any:
    """Return a sample with arrays, images and tensors as their type, shape and bytes, which can be compared."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if hasattr(value, "__array_interface__") or type(value).__module__ == "torch":
        import numpy

        array = numpy.asarray(value)
        return "array", array.dtype.str, array.shape, array.tobytes()
    return value


if __name__ == "__main__":  # a spawned process: it gets pickled shards and returns their samples
    given = pickle.load(sys.stdin.buffer)
    sys.path[:] = given[0]
    shards = pickle.loads(given[1])
    sys.stdout.buffer.write(pickle.dumps(samples(shards, shards.chunks(), backwards=True)))
