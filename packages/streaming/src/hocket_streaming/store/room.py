"""Room in a cache folder: bytes are reserved before they are written, and the least recently used chunks are removed for them.

All is in the folder itself. A reservation is the size of a temporary file, which its writer holds a kernel lock on, so that
nothing outlives a killed process: whoever meets a temporary file without a lock removes it. Chunks are removed by ``unlink``:
processes that have mapped the file go on reading it. The time of modification says when a chunk was last opened; a time in the
future protects a chunk that was fetched ahead, until it is opened or that time has come.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"
#: Seconds to wait for another process that makes room, which takes milliseconds; a stopped one must not block all others.
_PATIENCE = 3.0


class Room:
    """Keeps the files of a folder within a number of bytes. Methods raise OSError where the folder cannot be used.

    Args:
        folder: the folder; it may be removed at any time.
        limit: bytes. Where processes with different limits share a folder, the smallest limit holds.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._oldest: list[tuple[int, int, str]] = []

    def reserve(self, descriptor: int, size: int) -> None:
        """Give a locked temporary file this size; chunks are removed where the sum would exceed the limit."""
        with self._counted() as count:
            total = _read(count)
            growth = size - os.fstat(descriptor).st_size
            if total is None or total + growth > self.limit:
                total = self._evict(total, self.limit - growth)
            os.pwrite(
                count, struct.pack("q", total + growth), 0
            )  # a kill after this line counts too much, never too little
            os.ftruncate(descriptor, size)

    def release(self, descriptor: int, path: Path, left: bytes = b"") -> None:
        """Remove a temporary file and its reservation; ``left`` is for the processes that have it open and wait."""
        with suppress(OSError):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, left, 0)
            with self._counted() as count:
                path.unlink()
                if (total := _read(count)) is not None:
                    os.pwrite(count, struct.pack("q", total - size), 0)
        with suppress(OSError):
            path.unlink()

    def sweep(self) -> None:
        """Remove what killed processes left, and count anew."""
        with suppress(OSError), self._counted() as count:
            os.pwrite(count, struct.pack("q", self._scan()), 0)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """Open and lock the file that has the sum of all sizes."""
        descriptor = os.open(self.folder / ".total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + _PATIENCE
            while not locks(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise OSError(errno.ETIMEDOUT, "another process has locked the cache for seconds", str(self.folder))
                time.sleep(0.0005)
            yield descriptor
        finally:
            os.close(descriptor)

    def _evict(self, total: int | None, goal: int) -> int:
        """Remove the least recently used chunks until the sum is at most ``goal``, or no chunk is left. Return the sum."""
        if total is not None:  # what the last scan listed is older than all that came later
            total = self._remove(total, goal)
        if total is None or total > goal:
            total = self._remove(self._scan(), goal)
            now = time.time_ns()
            self._oldest = [one for one in self._oldest if one[0] <= now]
        return total

    def _remove(self, total: int, goal: int) -> int:
        while total > goal and self._oldest:
            modified, size, name = self._oldest.pop()
            with suppress(FileNotFoundError):
                if os.stat(self.folder / name).st_mtime_ns == modified:
                    os.unlink(self.folder / name)
                    total -= size
        return total

    def _scan(self) -> int:
        """List chunks, the least recently used last; return the sum of all sizes."""
        chunks: dict[str, tuple[int, int, str]] = {}  # by name, since a fetch may end while its file is looked at
        reserved: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(PART)
                with suppress(FileNotFoundError):
                    if name.startswith(".") or (name != entry.name and _abandoned(entry.path)):
                        continue
                    if name != entry.name:
                        reserved[name] = _size(entry.path, self.folder / name)
                    else:
                        about = entry.stat(follow_symlinks=False)
                        chunks[name] = about.st_mtime_ns, about.st_size, name
        self._oldest = sorted(chunks.values(), reverse=True)
        sizes = reserved | {name: size for _, size, name in self._oldest}
        return sum(sizes.values())


def _size(part: str, path: Path) -> int:
    """Return the size of a temporary file, or of the chunk that it has become."""
    try:
        return os.stat(part).st_size
    except FileNotFoundError:
        return os.stat(path).st_size


def locks(descriptor: int, how: int) -> bool:
    """Lock a file if no other process or thread has it locked. Return whether it did."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _abandoned(path: str) -> bool:
    """Remove a temporary file if no process is writing it. Return whether it did."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # complete since it was listed, and renamed; or of another user
    try:
        if not locks(descriptor, fcntl.LOCK_EX) or not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return False
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> int | None:
    data = os.pread(descriptor, 8, 0)
    return struct.unpack("q", data)[0] if len(data) == 8 else None
