"""Logging of what streams cost: bytes, fetches, waits, and the size of the cache."""

from __future__ import annotations

import time
from collections import Counter

from hocket.state.periodic import Periodic
from hocket.state.state import State
from hocket_streaming.dataset import StreamDataset
from hocket_streaming.loader import StreamLoader


class StreamMonitor(Periodic):
    """Log what the streams that a run trains on cost this rank, its worker processes included.

    * ``stream/bytes``, ``stream/chunks``: fetched from the store since the fit began
    * ``stream/bytes_per_second``: fetched, since the report before
    * ``stream/waited``: the fraction of the time since the report before that a process waited for chunks, on average over the
      processes that load samples
    * ``stream/retries``, ``stream/skipped``: further attempts after faults of the store, and chunks that are left out
    * ``stream/cache_bytes``: all chunks in the folder of the cache

    Nothing is logged of data that is no stream.

    Args:
        every: how often to log; the end of a fit logs too.

    Example:
        >>> import hocket, numpy, tempfile, torch
        >>> import hocket_streaming
        >>> from hocket.loggers.memory import MemoryLogger
        >>> numpy.save(path := tempfile.mkdtemp() + "/x.npy", numpy.ones((8, 2), "float32"))
        >>> logger = MemoryLogger()
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(2, 1), loss=lambda outputs, batch: outputs.mean(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=hocket_streaming.stream(path), global_batch=4, callbacks=["stream-monitor"], loggers=[logger],
        ... )
        >>> result = trainer.fit("1ep")
        >>> logger.metrics["stream/bytes"]  # the file is on this disk, and read where it is
        [(2, 0.0)]
    """

    def __init__(self, every: str = "50ba") -> None:
        super().__init__(every)
        self._began = self._before = Counter[str]()
        self._then = 0.0

    def fit_start(self, state: State) -> None:
        """Begin to count."""
        super().fit_start(state)
        self._began = self._before = _sums(state)
        self._then = time.monotonic()

    def _report(self, state: State) -> None:
        streams, now, then = _streams(state), time.monotonic(), self._then
        if not streams:
            return
        sums = _sums(state)
        since, total = ({name: sums[name] - earlier[name] for name in sums} for earlier in (self._before, self._began))
        self._before, self._then = sums, now
        loading = max(sum(loader.num_workers for loader in _loaders(state)), 1)
        figures = {
            "bytes": total["bytes_fetched"],
            "chunks": total["chunks_fetched"],
            "bytes_per_second": since["bytes_fetched"] / max(now - then, 1e-9),
            "waited": since["waited"] / max(now - then, 1e-9) / loading,
            "retries": total["retries"],
            "skipped": total["skipped"],
            "cache_bytes": float(
                sum({cache.folder: cache.size() for cache in (one.cache for one in streams)}.values())
            ),
        }
        state.log({f"stream/{name}": value for name, value in figures.items()})


def _loaders(state: State) -> list[StreamLoader]:
    data = state.data.train_data
    return [loader for loader in getattr(data, "loaders", {"": data}).values() if isinstance(loader, StreamLoader)]


def _streams(state: State) -> list[StreamDataset]:
    return [dataset for loader in _loaders(state) for dataset in loader.streams]


def _sums(state: State) -> Counter[str]:
    sums: Counter[str] = Counter()
    for one in _streams(state):
        sums.update(one.counters.read())
    return sums
