"""Check a data set: every chunk is read, verified, opened, and its samples are decoded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hocket.errors import Mistake, WrongValue
from hocket_streaming.errors import AccessDenied, DamagedData, Unreachable
from hocket_streaming.writing.chunk_reading import opened
from hocket_streaming.writing.progress import Progress

if TYPE_CHECKING:
    from hocket_streaming.shards import Chunk, Shards


class Damage(NamedTuple):
    """A chunk that cannot be read as its index says.

    Attributes:
        url: of its first file.
        chunk: its number.
        first, last: the numbers of its samples in the data set.
        cause: what is wrong.
    """

    url: str
    chunk: int
    first: int
    last: int
    cause: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` found.

    Attributes:
        chunks, samples, bytes: of the chunks that were read.
        unverified: chunks among them whose index has no checksum: wrong bytes in them may go unseen.
        damages: in the order of chunks.
        seconds: that it took.
    """

    chunks: int
    samples: int
    bytes: int
    unverified: int
    damages: tuple[Damage, ...]
    seconds: float


def check(
    shards: Shards, chunks: Sequence[Chunk], share: float = 1.0, threads: int = 8, progress: Progress | None = None
) -> Checked:
    """Read chunks and decode all their samples.

    Args:
        shards: the data set.
        chunks: those of its index.
        share: of the chunks, from above 0 to 1, at even distances.
        threads: chunks that are read at the same time.
        progress: where progress is shown.

    Raises:
        WrongValue: share or threads are not possible.
        AccessDenied: the store refuses access; Unreachable: it does not answer.
    """
    if not 0 < share <= 1:
        raise WrongValue(f"«share={share:g}» should be above 0, and at most 1. Write «share=1» for all chunks.")
    if threads < 1:
        raise WrongValue(f"«threads={threads}» should be 1 or more. Write «threads=8».")
    began = time.monotonic()
    starts = np.concatenate([[0], np.cumsum([chunk.samples for chunk in chunks], dtype=np.int64)]).tolist()
    count = -(-len(chunks) * share // 1)
    numbers = sorted({int(step * len(chunks) / count) for step in range(int(count))})
    damages = []
    progress = progress or Progress(False)
    with progress, ThreadPoolExecutor(threads) as pool:
        progress.start("chunks checked:", len(numbers))
        futures = {pool.submit(_cause, shards, chunks[number]): number for number in numbers}
        try:
            for future in as_completed(futures):
                number = futures[future]
                if cause := future.result():
                    url = shards.files.url(chunks[number].parts[0].file)
                    damages.append(Damage(url, number, starts[number], starts[number + 1] - 1, cause))
                progress.step()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    read = [chunks[number] for number in numbers]
    return Checked(
        chunks=len(read),
        samples=sum(chunk.samples for chunk in read),
        bytes=sum(chunk.size for chunk in read),
        unverified=sum(not chunk.checksum for chunk in read),
        damages=tuple(sorted(damages, key=lambda each: each.chunk)),
        seconds=time.monotonic() - began,
    )


def _cause(shards: Shards, chunk: Chunk) -> str:
    """Return what is wrong with a chunk, "" if nothing is."""
    try:
        try:
            content = opened(shards, chunk)
        except DamagedData:  # perhaps on the way
            content = opened(shards, chunk)
        for row in range(chunk.samples):
            shards.get(content, row)
    except (AccessDenied, Unreachable):
        raise
    except ImportError:
        raise
    except Mistake as error:
        return str(error)
    except Exception as error:  # of a decoder
        return f"{type(error).__name__}: {error}"
    return ""
