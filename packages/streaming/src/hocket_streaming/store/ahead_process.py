"""The process that fetches chunks ahead: ``python -m hocket_streaming.store.ahead_process SETUP COUNTERS PARENT``.

`Ahead` starts it. It reads lists of chunk numbers from stdin, a line each, and ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from hocket_streaming.store.counters import Counters
from hocket_streaming.store.fetching import Chunks

_THREADS = 8
#: Seconds for which chunks that were fetched ahead are kept before used ones; renewed while they are wanted.
_LEASE = 60.0
#: Seconds after which a chunk whose fetch failed is tried again.
_RESPITE = 10.0


class Fetchers:
    """Threads that fetch the chunks of the latest list which are not in the cache, in its order."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._wanted: list[int] = []
        self._queue: list[int] = []
        self._busy: set[int] = set()
        self._failed: dict[int, float] = {}
        self._change = threading.Condition()
        for _ in range(_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def want(self, numbers: list[int]) -> None:
        with self._change:
            self._wanted = numbers
            self._queue = [number for number in reversed(numbers) if number not in self._busy]
            self._change.notify_all()
        self.protect()

    def protect(self, again: bool = False) -> None:
        self.chunks.cache.protect([self.chunks.name(number) for number in self._wanted], _LEASE, again)

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    self._change.wait()
                number = self._queue.pop()
                if time.monotonic() < self._failed.get(number, 0.0):
                    continue
                self._busy.add(number)
            try:
                name = self.chunks.name(number)
                if not self.chunks.in_place(number) and not self.chunks.cache.has(name):
                    self.chunks.fetch_ahead(number)
                    self.chunks.cache.protect([name], _LEASE)
            except Exception:  # whoever needs the chunk meets the error, too
                self._failed[number] = time.monotonic() + _RESPITE
            finally:
                with self._change:
                    self._busy.discard(number)


def lines(parent: int) -> Iterator[bytes | None]:
    """Yield lines of stdin, of several only the last, and None now and then; end when the parent has ended.

    Forked children of the parent have the other end of the pipe as well, so that its end alone does not tell.
    """
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            yield None
            continue
        block = os.read(0, 1 << 16)
        if not block:
            return
        *complete, rest = (rest + block).split(b"\n")
        if complete:
            yield complete[-1]


def main() -> None:
    os.nice(10)  # where processors are few, whoever needs a chunk now goes first
    signal.signal(signal.SIGTERM, _ended)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Control-C is for the parent, which ends this process
    setup, counters, parent = map(int, sys.argv[1:])
    with os.fdopen(setup, "rb") as file:
        sys.path[:] = pickle.load(file)
        shards, chunks, cache, version = pickle.load(file)
    try:
        with suppress(Exception):  # a chunk that this process claims before it can fetch would hold up who needs it
            shards.files.has(chunks[0].parts[0].file)
        fetchers = Fetchers(Chunks(shards, chunks, cache, 1, Counters(counters), version))
        renewed = time.monotonic()
        for line in lines(parent):
            if line is not None:
                fetchers.want([int(number) for number in line.split()])
            elif time.monotonic() > renewed + _LEASE / 3:
                renewed = time.monotonic()
                fetchers.protect(again=True)
    finally:
        cache.abandon()
        os._exit(0)  # threads may be waiting for the store


def _ended(*signal: object) -> None:
    raise SystemExit


if __name__ == "__main__":
    main()
