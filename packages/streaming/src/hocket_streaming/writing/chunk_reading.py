"""Read a chunk as it is stored, and verify it, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket_streaming.checksums import matches
from hocket_streaming.errors import DamagedData

if TYPE_CHECKING:
    from hocket_streaming.shards import Chunk, Shards


def fetched(shards: Shards, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk as they are stored.

    Raises:
        DamagedData: their size or checksum is not that of the index.
        StreamError: they cannot be read.
    """
    content = b"".join(shards.files.read(part.file, part.start, part.size) for part in chunk.parts)
    if not matches(content, chunk.checksum):
        kind = chunk.checksum.partition(":")[0]
        raise DamagedData(
            f"{shards.files.url(chunk.parts[0].file)}: the {kind} checksum of a chunk differs from the index."
        )
    return content


def opened(shards: Shards, chunk: Chunk) -> Any:
    """Return a chunk that was read and verified, opened for `Shards.get`."""
    return shards.open(chunk, memoryview(shards.unpack(chunk, fetched(shards, chunk))))
