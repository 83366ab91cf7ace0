"""The smallest real format: files of records of one size, each of which says its number and has a checksum of its own.

It knows no torch, so that the process that fetches ahead can import it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from hocket_streaming.shards import Chunk, Part, Shards
from hocket_streaming.store.files import Files

SIZE = 64


def record(number: int, size: int = SIZE) -> bytes:
    head = number.to_bytes(8, "little")
    return (head + hashlib.shake_128(head).digest(32) * (size // 32))[:size]


class Records(Shards):
    """Chunks of ``each`` records of ``size`` bytes; ``packed`` files are compressed, ``parts`` divides a chunk."""

    def __init__(
        self,
        files: Files,
        *,
        chunks: int,
        each: int,
        size: int = SIZE,
        packed: bool = False,
        parts: int = 1,
        sums: bool = True,
    ) -> None:
        super().__init__(files)
        self.count, self.each, self.size, self.packed, self.parts, self.sums = chunks, each, size, packed, parts, sums

    def file(self, number: int) -> bytes:
        data = b"".join(record(number * self.each + row, self.size) for row in range(self.each))
        return zlib.compress(data, 1) if self.packed else data

    def chunks(self) -> Sequence[Chunk]:
        out = []
        for number in range(self.count):
            data = self.file(number)
            edges = [len(data) * part // self.parts for part in range(self.parts + 1)]
            parts = tuple(Part(f"{number:05}.rec", edges[k + 1] - edges[k], edges[k]) for k in range(self.parts))
            checksum = f"xxh64:{xxhash.xxh64(data).hexdigest()}" if self.sums else ""
            out.append(Chunk(parts, self.each, checksum, self.each * self.size if self.packed else 0))
        return out

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(self.count):
            (folder / f"{number:05}.rec").write_bytes(self.file(number))

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        return zlib.decompress(fetched) if self.packed else fetched

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        return data

    def get(self, opened: Any, row: int) -> bytes:
        return bytes(opened[row * self.size : (row + 1) * self.size])
