"""`Ahead`: a process that fetches chunks into the cache before they are needed."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence

from hocket_streaming.store.fetching import Chunks

#: Chunks that one list names at most; more are not fetched before the next list.
_MOST = 4096


class Ahead:
    """Has chunks fetched by a process of its own, in the order in which they will be needed. It never blocks this process.

    Faults of the store are ignored there: whoever needs the chunk meets the error. The process imports no torch, and it ends
    when this one ends, whatever ends it. None is started for chunks that are read where they are on disk.

    Args:
        chunks: the chunks of a data set, with their cache and counters.
        bytes_ahead: bytes of the chunks at the beginning of a list that are fetched; at most half of the cache's limit counts.

    Example:

        >>> import tempfile
        >>> from hocket_streaming.store.ahead import Ahead
        >>> from hocket_streaming.store.cache import Cache
        >>> from hocket_streaming.store.fetching import Chunks
        >>> from hocket_streaming.store.files import Files
        >>> from hocket_streaming.shards import Shards
        >>> folder = tempfile.mkdtemp()
        >>> local = Chunks(Shards(Files(folder)), [], Cache(folder, 1000), keep=1)
        >>> with Ahead(local, bytes_ahead=500) as ahead:
        ...     ahead.want([])
        ...     print(ahead.pid)
        None
    """

    def __init__(self, chunks: Chunks, bytes_ahead: int) -> None:
        self._budget = min(bytes_ahead, chunks.cache.limit // 2)
        self._sizes = [chunk.kept for chunk in chunks.chunks]
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        self._begun = False
        self._close: Callable[[], object] = lambda: None
        if self._budget > 0 and not all(map(chunks.in_place, range(len(chunks.chunks)))):
            self._start(chunks)

    @property
    def pid(self) -> int | None:
        """The process, or None where none is needed."""
        return self._process.pid if self._process else None

    def want(self, numbers: Sequence[int]) -> None:
        """Replace the list of chunks that will be needed, by number, the next one first."""
        if self._process is None or self._process.stdin is None:
            return
        count = total = 0
        for number in numbers[:_MOST]:
            total += self._sizes[number]
            if total > self._budget:
                break
            count += 1
        line = b" ".join(b"%d" % number for number in numbers[:count]) + b"\n"
        # A list that was sent in part must be completed; one that was not sent at all is replaced.
        first, newline, _ = self._unsent.partition(b"\n")
        self._unsent = (first + newline if self._begun else b"") + line
        self._send()

    def close(self) -> None:
        """End the process."""
        self._close()
        self._process = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            sent = os.write(self._process.stdin.fileno(), self._unsent)
        except BlockingIOError:
            return
        except OSError:  # it has ended: chunks are fetched when they are needed
            self.close()
            return
        rest = self._unsent[sent:]
        self._begun = bool(rest) and not self._unsent[:sent].endswith(b"\n")
        self._unsent = rest

    def _start(self, chunks: Chunks) -> None:
        with tempfile.TemporaryFile() as setup:
            # The module of the format may be importable here only by a changed sys.path
            pickle.dump([path or os.getcwd() for path in sys.path], setup)
            pickle.dump((chunks.shards, list(chunks.chunks), chunks.cache, chunks.version), setup)
            setup.seek(0)
            descriptors = (setup.fileno(), chunks.counters.fileno())
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hocket_streaming.store.ahead_process",
                    *map(str, descriptors),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._close = weakref.finalize(self, _end, self._process, os.getpid())


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """End the process. In a forked process, whose child it is not, close this end of the pipe."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    if os.getpid() != parent:
        process.returncode = 0
        return
    process.terminate()  # forked processes may have the pipe open
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
