"""`Cache`: a bounded folder of chunks, which the ranks and workers of a machine share, and any number of runs."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from hocket.help import warn
from hocket_streaming import errors
from hocket_streaming.errors import StreamError
from hocket_streaming.store.room import PART, Room, locks

#: After the data of a chunk: this, and the XXH3 of the data.
_MARK = b"hocket-1"
_TRAILER = len(_MARK) + 8
#: What a temporary file holds, once removed, whose fetch failed: the error, for those who waited.
_FAILED = b"hocket-failed-1 "
#: Seconds to wait for a fetch of another process before fetching without the cache: it may be stopped.
_PATIENCE = 30.0
_DONE = 0o444


class Cache:
    """Chunks on disk, by name. A chunk is fetched by one process while others wait; the least recently used go first.

    Kernel locks on temporary files hold fetches apart, so that a killed process blocks nobody, and the next process removes its
    temporary file. Where the folder cannot be written, such as on a full disk, chunks stay in memory, and a warning says so.

    Args:
        folder: created on first use; it may be removed while processes use it.
        limit: bytes of all chunks, those being fetched among them. Only concurrent fetches may exceed it, by a chunk each. Of
            different limits on one folder the smallest holds.

    Example:

        >>> import tempfile
        >>> from hocket_streaming.store.cache import Cache
        >>> cache = Cache(tempfile.mkdtemp(), limit=10_000_000)
        >>> bytes(cache.get("one", 4, lambda: b"data"))
        b'data'
        >>> bytes(cache.get("one", 4, lambda: b"not called"))
        b'data'
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self.limit = limit
        self._room = Room(self.folder, limit)
        self._swept = False
        self._warned = False
        self._parts: dict[int, Path] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return Cache, (self.folder, self.limit)

    def has(self, name: str) -> bool:
        """Whether a chunk is here now."""
        return os.path.exists(self.folder / name)

    def size(self) -> int:
        """Return the bytes of all chunks that are here, those being fetched among them."""
        total = 0
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += 0 if entry.name.startswith(".") else entry.stat().st_size
        return total

    def stored(self, name: str) -> memoryview | None:
        """Return a chunk that is here, mapped and with its checksum verified, or None. It counts as used now."""
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            data = _mapped(descriptor)
            if data is None or bytes(data.obj[-_TRAILER:]) != _MARK + xxhash.xxh3_64_digest(data):  # type: ignore[index]
                with suppress(OSError):
                    path.unlink()
                return None
            with suppress(OSError):
                os.utime(descriptor)
            return data
        finally:
            os.close(descriptor)

    def protect(self, names: list[str], seconds: float, again: bool = False) -> None:
        """Remove these chunks later than all others for some time, the last of them first. ``again``: those not used since."""
        until = time.time_ns() + int(seconds * 1e9)
        for place, name in enumerate(names):
            with suppress(OSError):
                path = self.folder / name
                if not again or os.stat(path).st_mtime_ns > time.time_ns():
                    os.utime(path, ns=(until, until - place * 1_000_000))

    def get(self, name: str, size: int, fetch: Callable[[], bytes]) -> memoryview:
        """Return a chunk: from here, from a process that is fetching it, or from ``fetch``.

        Args:
            name: a file name that tells the chunk from all others.
            size: bytes that ``fetch`` returns, for which room is made before.
            fetch: called in one process at a time; its StreamErrors are raised in the processes that waited for it, too.
        """
        if not self._swept:
            self._swept = True
            self._room.sweep()
        until = time.monotonic() + _PATIENCE
        while size + _TRAILER <= self.limit and time.monotonic() < until:
            if (data := self.stored(name)) is not None:
                return data
            try:
                descriptor = self._claim(name, until)
            except StreamError:
                raise
            except OSError as error:
                self._warn(error)
                break
            if descriptor is not None:
                return self._filled(descriptor, name, size, fetch)
        return memoryview(fetch())

    def abandon(self) -> None:
        """Remove the temporary files of fetches in progress, before this process ends."""
        for descriptor, path in list(self._parts.items()):
            self._room.release(descriptor, path)

    def _claim(self, name: str, until: float) -> int | None:
        """Return a locked temporary file for a chunk; or None after another process ended its fetch, well or not."""
        path = self.folder / (name + PART)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        claimed = False
        try:
            if not locks(descriptor, fcntl.LOCK_EX):
                _wait(descriptor, until)
                return None
            with suppress(FileNotFoundError):
                claimed = os.path.samestat(os.stat(path), os.fstat(descriptor))
            if claimed and self.has(name):  # completed since `stored` looked
                path.unlink(missing_ok=True)
                claimed = False
            return descriptor if claimed else None
        finally:
            if not claimed:
                os.close(descriptor)

    def _filled(self, descriptor: int, name: str, size: int, fetch: Callable[[], bytes]) -> memoryview:
        """Fetch a chunk into a locked temporary file, and give it its name."""
        part = self.folder / (name + PART)
        self._parts[descriptor] = part
        left, complete = b"", False
        try:
            self._tried(lambda: self._room.reserve(descriptor, size + _TRAILER))
            data = fetch()
            complete = self._tried(lambda: self._complete(descriptor, part, data, size))
            mapped = _mapped(descriptor) if complete else None
            return memoryview(data) if mapped is None else mapped
        except StreamError as error:
            left = _FAILED + json.dumps([type(error).__name__, str(error)]).encode()
            raise
        finally:
            if not complete:
                self._room.release(descriptor, part, left)
            self._parts.pop(descriptor, None)
            os.close(descriptor)

    def _complete(self, descriptor: int, part: Path, data: bytes, size: int) -> None:
        """Write a chunk and its checksum, and give it its name."""
        if len(data) != size:
            self._room.reserve(descriptor, len(data) + _TRAILER)
        _write(descriptor, [data, _MARK + xxhash.xxh3_64_digest(data)])
        os.fchmod(descriptor, _DONE)
        os.rename(part, part.with_suffix(""))

    def _tried(self, act: Callable[[], None]) -> bool:
        """Use the disk, and return whether it worked; or warn. The next fetch creates a folder that was removed meanwhile."""
        try:
            act()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"The cache {self.folder} cannot be written: {error}. Chunks are fetched into memory instead, by every process "
                "that needs them. Give another folder or a smaller limit, as in cache='/scratch/cache', cache_limit='20GB'."
            )


def _mapped(descriptor: int) -> memoryview | None:
    """Map a chunk; None where it is too short to be one."""
    size = os.fstat(descriptor).st_size
    if size < _TRAILER:
        return None
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate, mmap.PROT_READ))[:-_TRAILER]


def _write(descriptor: int, blocks: list[bytes]) -> None:
    at = 0
    for block in blocks:
        view = memoryview(block)
        while view:
            written = os.pwrite(descriptor, view, at)
            at, view = at + written, view[written:]


def _wait(descriptor: int, until: float) -> None:
    """Wait until the process that fetches a chunk completes it, fails or ends; raise its error."""
    pause = 0.0005
    while not locks(descriptor, fcntl.LOCK_SH):
        about = os.fstat(descriptor)
        if about.st_nlink == 0 or about.st_mode & _DONE == _DONE or time.monotonic() > until:
            break  # its lock may outlive the fetch, in a process forked meanwhile
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    left = os.pread(descriptor, 1 << 16, 0) if os.fstat(descriptor).st_nlink == 0 else b""
    if left.startswith(_FAILED):
        kind, text = json.loads(left.removeprefix(_FAILED))
        raise getattr(errors, kind, StreamError)(text)
