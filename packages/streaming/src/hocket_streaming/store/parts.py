"""Parts of files: the requests that they need, maps of them, and what is wrong with their bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from hocket_streaming.checksums import checksum, matches
from hocket_streaming.shards import Chunk, Part

#: Bytes of one request; larger parts are fetched by several at once.
_SPAN = 16 << 20


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return parts, of which those that follow each other in a file are one."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and last.file == part.file and last.start + last.size == part.start:
            merged[-1] = Part(last.file, last.size + part.size, last.start)
        else:
            merged.append(part)
    return merged


def spans(part: Part) -> list[Part]:
    """Return the requests for a part."""
    count = max(1, -(-part.size // _SPAN))
    edges = [part.start + part.size * place // count for place in range(count + 1)]
    return [Part(part.file, stop - start, start) for start, stop in pairwise(edges)]


def damage(chunk: Chunk, data: bytes | memoryview) -> str:
    """Return what is wrong with the bytes of a chunk, or ""."""
    if len(data) != chunk.size:
        return f"it has {len(data):,} bytes, and its index says {chunk.size:,}"
    if matches(data, chunk.checksum):
        return ""
    return f"its checksum is {checksum(data, chunk.checksum.partition(':')[0])}, and its index says {chunk.checksum}"


def mapped(path: str, part: Part) -> memoryview:
    if not part.size:
        return memoryview(b"")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        have = os.fstat(descriptor).st_size
        if have < part.start + part.size:
            raise ValueError(f"the file has {have:,} bytes, and its index says {part.start + part.size:,} or more")
        before = part.start % mmap.ALLOCATIONGRANULARITY
        whole = mmap.mmap(descriptor, part.size + before, mmap.MAP_SHARED, mmap.PROT_READ, offset=part.start - before)
        return memoryview(whole)[before:]
    finally:
        os.close(descriptor)


def begin_to_read(path: str, part: Part) -> None:
    """Have the system read a part of a file into memory, without waiting for it. Who maps it meets the errors."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, part.start, part.size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
