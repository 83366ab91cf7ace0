"""`Chunks`: opens chunks of a data set, from the disk, the cache or the store."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hocket.errors import Mistake, WrongValue
from hocket_streaming.errors import DamagedData, StreamError
from hocket_streaming.shards import Chunk, Part, Shards
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.counters import Counters
from hocket_streaming.store.parts import begin_to_read, damage, mapped, merged, spans
from hocket_streaming.store.retrying import Attempts, failed
from hocket_streaming.threads import in_threads

_THREADS = 8
#: Bytes of local chunks that the system is asked for at a time, before they are needed.
_READ_AHEAD = 256 << 20


class Chunks:
    """Opens chunks of a data set in this process, and keeps the latest ones open. It pickles into worker processes.

    Uncompressed local data are mapped where they are, their checksum is verified once. Other chunks go through the cache.

    Args:
        shards: the format and the files.
        chunks: the chunks of the data set.
        cache: where chunks are kept; unused for local data that need no unpacking.
        keep: how many chunks this process keeps open.
        counters: where costs are added up; by default in an object of its own.
        version: tells the contents of the files from earlier ones, where chunks have no checksums.

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
        self,
        shards: Shards,
        chunks: Sequence[Chunk],
        cache: Cache,
        keep: int,
        counters: Counters | None = None,
        version: str = "",
    ) -> None:
        if keep < 1:
            raise WrongValue(f"«keep={keep!r}» keeps no chunk open. Give 1 or more, such as «keep=32».")
        self.shards = shards
        self.chunks = chunks
        self.cache = cache
        self.keep = keep
        self.counters = counters or Counters()
        self.version = version
        kind = type(shards)
        self._data_set = f"{shards.files.url()} {kind.__module__}.{kind.__qualname__} {version}"
        self._opened: OrderedDict[int, Any] = OrderedDict()
        #: 1 for each local chunk whose checksum was verified, by this process or by one that was forked.
        self._verified = mmap.mmap(-1, max(1, len(chunks)))
        self._requested: set[int] = set()
        self._names: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_verified": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_verified": mmap.mmap(-1, max(1, len(state["chunks"])))}

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
        data = self._here(number)
        if data is None:
            with self._waiting():
                data = self._fetch(number)
        return self._open(number, data)

    def open_all(self, numbers: Iterable[int], errors: dict[int, StreamError] | None = None) -> None:
        """Fetch and open chunks that are not here, several at a time; a batch has samples of many.

        Args:
            numbers: of chunks.
            errors: where errors are put, by chunk; None to raise the first one.
        """
        absent = [number for number in numbers if number not in self._opened and not self._at_hand(number)]
        if len(absent) < 2:
            return

        def fetched(number: int) -> memoryview | StreamError:
            try:
                return self._fetch(number)
            except StreamError as error:
                if errors is None:
                    raise
                return error

        with self._waiting():
            for number, data in zip(absent, in_threads(fetched, absent, _THREADS), strict=True):
                if isinstance(data, StreamError):
                    assert errors is not None
                    errors[number] = data
                else:
                    with suppress(StreamError):  # whoever reads it meets the error
                        self._open(number, data)

    def _open(self, number: int, data: memoryview) -> Any:
        one = self._opened[number] = self.shards.open(self.chunks[number], data)
        while len(self._opened) > self.keep:
            self._opened.popitem(last=False)
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

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Have the system read chunks of local files: the first ones of a list that it was not asked for before."""
        self._requested.intersection_update(numbers := list(numbers))
        left = _READ_AHEAD
        for number in numbers if self.shards.files.local else ():
            if number in self._requested:
                continue
            left -= self.chunks[number].size
            if left < 0:
                break
            self._requested.add(number)
            if self.in_place(number) or not self.cache.has(self.name(number)):
                for part in merged(self.chunks[number].parts):
                    begin_to_read(str(self.shards.files.local_path(part.file)), part)

    def fetch_ahead(self, number: int) -> None:
        """Fetch a chunk into the cache if it is not there."""
        if not self._at_hand(number):
            self._fetch(number)

    def _at_hand(self, number: int) -> bool:
        return self.in_place(number) or self.cache.has(self.name(number))

    def _here(self, number: int) -> memoryview | None:
        """Return the bytes of a chunk that is on disk or in the cache, else None."""
        if self.in_place(number):
            return self._on_disk(number)
        data = self.cache.stored(self.name(number))
        if data is not None:
            self.counters.add(hits=1)
        return data

    def _fetch(self, number: int) -> memoryview:
        return self.cache.get(self.name(number), self.chunks[number].kept, lambda: self._fetched(number))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
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
        return self._read(spans[0]) if len(spans) == 1 else b"".join(in_threads(self._read, spans, _THREADS))

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
        if not self._verified[number]:
            if wrong := damage(chunk, data):
                raise self._about(number, DamagedData(wrong))
            self._verified[number] = 1
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
