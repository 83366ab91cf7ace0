"""`Counters`: what reading a stream costs, added up over the processes of a rank."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing.context
import os
import struct
import tempfile
import threading
from multiprocessing.reduction import DupFd
from typing import Any

_FIELDS = ("bytes_fetched", "chunks_fetched", "hits", "waited", "retries", "skipped")
_SIZE = 8 * len(_FIELDS)


class Counters:
    """Numbers that this process, its forked and spawned children and the process that fetches ahead add to.

    They are in a file without a name, so nothing stays on disk whatever becomes of the processes. An object that is pickled to
    start a child process stays connected; any other copy begins at 0.

    | counter | what it counts |
    |---|---|
    | ``bytes_fetched`` | bytes that came from the store |
    | ``chunks_fetched`` | chunks that came from the store |
    | ``hits`` | chunks that were opened without a fetch |
    | ``waited`` | seconds that reading waited for chunks |
    | ``retries`` | further attempts after faults of the store |
    | ``skipped`` | chunks that were skipped because they are damaged |

    Example:

        >>> from hocket_streaming.store.counters import Counters
        >>> counters = Counters()
        >>> counters.add(bytes_fetched=1000, waited=0.5)
        >>> counters.read()["bytes_fetched"], counters.read()["waited"]
        (1000.0, 0.5)
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(_SIZE)
                descriptor = os.dup(file.fileno())
        self._fd = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        spawns = multiprocessing.context.get_spawning_popen() is not None
        return (_connected, (DupFd(self._fd),)) if spawns else (Counters, ())

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Return the descriptor, for a child process that inherits it: ``Counters(descriptor)`` there."""
        return self._fd

    def add(self, **amounts: float) -> None:
        """Add to some of the counters."""
        if self._pid != os.getpid():  # another thread of the parent may have held the lock while it forked
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:  # a lock of the kernel holds processes apart, not threads, and a killed process leaves none
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                for name, amount in amounts.items():
                    at = 8 * _FIELDS.index(name)
                    struct.pack_into("d", self._map, at, struct.unpack_from("d", self._map, at)[0] + amount)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def read(self) -> dict[str, float]:
        """Return the sums over all processes, by name."""
        return dict(zip(_FIELDS, struct.unpack(f"{len(_FIELDS)}d", self._map[:]), strict=True))


def _connected(descriptor: Any) -> Counters:
    return Counters(descriptor.detach())
