"""`Chunks`: opens chunks of a data set, from the disk, the cache or the store."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.errors import Mistake, WrongValue
from hocket_streaming.errors import DamagedData, StreamError
from hocket_streaming.shards import Chunk, Part, Shards
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.counters import Counters
from hocket_streaming.store.parts import damage, mapped, merged, spans
from hocket_streaming.store.retrying import Attempts, failed

_THREADS = 8


class Chunks:
    """Opens chunks of a data set in this process, and keeps the latest ones open. It pickles into worker processes.

    Uncompressed local data are mapped where they are, their checksum is verified once. Other chunks go through the cache.

    Args:
        shards: the format and the files.
        chunks: the chunks of the data set.
        cache: where chunks are kept; unused for local data that need no unpacking.
        keep: how many chunks this process keeps open.
        counters: where costs are added up; by default in an object of its own.

    Example:

        >>> import tempfile
        >>> from hocket_streaming.shards import Chunk, Part, Shards
        >>> from hocket_streaming.store.cache import Cache
        >>> from hocket_streaming.store.fetching import Chunks
        >>> from hocket_streaming.store.files import Files
        >>> class Letters(Shards):
        ...     def open(self, chunk, data):
        ...         return data
        ...     def get(self, opened, row):
        ...         return chr(opened[row])
        >>> files = Files(tempfile.mkdtemp())
        >>> files.write("a", b"xyz")
        >>> one = Chunk((Part("a", 3),), samples=3)
        >>> chunks = Chunks(Letters(files), [one], Cache(tempfile.mkdtemp(), limit=1_000_000), keep=1)
        >>> chunks.shards.get(chunks.open(0), 2)
        'z'
    """

    def __init__(
        self, shards: Shards, chunks: Sequence[Chunk], cache: Cache, keep: int, counters: Counters | None = None
    ) -> None:
        if keep < 1:
            raise WrongValue(f"«keep={keep!r}» keeps no chunk open. Give 1 or more, such as «keep=32».")
        self.shards = shards
        self.chunks = chunks
        self.cache = cache
        self.keep = keep
        self.counters = counters or Counters()
        kind = type(shards)
        self._data_set = f"{shards.files.url()} {kind.__module__}.{kind.__qualname__}"
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._verified: set[int] = set()
        self._names: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_verified": set()}

    def open(self, number: int) -> Any:
        """Return an opened chunk, by its number. It waits where another process is fetching it, else fetches it.

        Errors: those of `hocket_streaming.errors`, with the URL, the chunk and the cause, within 10 s of a fault.
        """
        opened = self._opened
        try:
            opened.move_to_end(number)
            return opened[number]
        except KeyError:
            pass
        one = opened[number] = self.shards.open(self.chunks[number], self._data(number))
        while len(opened) > self.keep:
            opened.popitem(last=False)
        return one

    def in_place(self, number: int) -> bool:
        """Whether a chunk is mapped where it is on disk: that of a local file whose bytes `Shards.unpack` does not change."""
        return self.shards.files.local and not self.chunks[number].stored

    def name(self, number: int) -> str:
        """Return the name of a chunk in the cache: a digest of the data set, the format and the chunk."""
        if number not in self._names:
            text = f"{self._data_set} {self.chunks[number].identity()}"
            self._names[number] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._names[number]

    def fetch_ahead(self, number: int) -> None:
        """Fetch a chunk into the cache if it is not there."""
        name = self.name(number)
        if not self.cache.has(name):
            self.cache.get(name, self.chunks[number].kept, lambda: self._fetched(number))

    def _data(self, number: int) -> memoryview:
        if self.in_place(number):
            return self._on_disk(number)
        name, began = self.name(number), time.perf_counter()
        data = self.cache.stored(name)
        if data is not None:
            self.counters.add(hits=1)
            return data
        try:
            return self.cache.get(name, self.chunks[number].kept, lambda: self._fetched(number))
        finally:
            self.counters.add(waited=time.perf_counter() - began)

    def _fetched(self, number: int) -> bytes:
        """Fetch a chunk, verify and unpack it. Damaged data are fetched again, twice at most."""
        chunk, attempts = self.chunks[number], Attempts(most=3)
        requests = [span for part in merged(chunk.parts) for span in spans(part)]
        while True:
            try:
                data = self._joined(requests)
            except Mistake as error:  # asked for several times already
                raise self._about(number, error) from error
            wrong = damage(chunk, data)
            cause: Exception | None = None
            if not wrong:
                try:
                    unpacked = self.shards.unpack(chunk, data)
                    self.counters.add(chunks_fetched=1)
                    return unpacked
                except DamagedData as error:
                    wrong, cause = str(error), error
                except Mistake:
                    raise
                except Exception as error:
                    wrong, cause = f"it cannot be unpacked ({type(error).__name__}: {error})", error
            if self.shards.files.local or not attempts.again():
                raise self._about(number, DamagedData(wrong)) from cause
            self.counters.add(retries=1)

    def _joined(self, spans: Sequence[Part]) -> bytes:
        if len(spans) == 1:
            return self._read(spans[0])
        pool = ThreadPoolExecutor(min(len(spans), _THREADS))
        try:
            return b"".join(pool.map(self._read, spans))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, span: Part) -> bytes:
        attempts, data = Attempts(), b""
        try:
            data = self.shards.files.read(span.file, span.start, span.size, attempts)
            return data
        finally:
            self.counters.add(bytes_fetched=len(data), retries=attempts.number - 1)

    def _on_disk(self, number: int) -> memoryview:
        """Map a local chunk. Its parts are joined in memory where there are several."""
        chunk = self.chunks[number]
        try:
            views = [mapped(str(self.shards.files.local_path(part.file)), part) for part in merged(chunk.parts)]
        except (OSError, ValueError) as error:
            first = self.shards.files.url(chunk.parts[0].file)
            damaged = DamagedData(str(error)) if isinstance(error, ValueError) else failed(error, first, Attempts())
            raise self._about(number, damaged) from error
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        if number not in self._verified:
            if wrong := damage(chunk, data):
                raise self._about(number, DamagedData(wrong))
            self._verified.add(number)
        return data

    def _about(self, number: int, error: Exception) -> Exception:
        """Return an error with the number of the chunk and its URL."""
        if isinstance(error, Mistake) and not isinstance(error, StreamError):
            return error
        chunk, about = self.chunks[number], f"Chunk {number} of {len(self.chunks)}"
        if "://" in str(error) or str(self.shards.files.path) in str(error):
            return type(error)(f"{about}: {error}")
        urls = ", ".join(dict.fromkeys(self.shards.files.url(part.file) for part in chunk.parts[:3]))
        text = str(error).rstrip(".")
        return type(error)(f"{about}, {urls}, is damaged: {text}. Write this file, or the index of the data, again.")
