"""Write checkpoints: at once or in a thread, by one rank or several. Report failures, and prune after each complete write."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from hocket.basics import seeding
from hocket.errors import CheckpointError
from hocket.help import warn
from hocket.state.ranks import Ranks
from hocket.state.state import State
from hocket_checkpoints.background import Background
from hocket_checkpoints.ownership import Ownership
from hocket_checkpoints.retention import Retention
from hocket_checkpoints.storage.snapshot import Snapshot
from hocket_checkpoints.storage.store import Store


class Writer:
    """Write the checkpoints of one Trainer, one at a time.

    Args:
        asynchronous: write in a thread, for which :meth:`settle` and :meth:`wait` wait.
        on_error: how :meth:`report` handles a failure.
    """

    def __init__(
        self,
        store: Store,
        owned: Ownership,
        retention: Retention,
        asynchronous: bool,
        on_error: Literal["stop", "warn"],
    ) -> None:
        self._store, self._owned, self._retention = store, owned, retention
        self._asynchronous, self._on_error = asynchronous, on_error
        self._background = Background()
        self._threads: Ranks | None = None
        self._failure: Exception | None = None
        #: Batch and evaluations at the latest checkpoint; None before the first one and after a failed write.
        self.saved: Any = None

    def write(self, state: State, name: str, tree: Mapping[str, Any], about: Mapping[str, Any], moment: Any) -> None:
        """Write a checkpoint, once the previous write has ended (see :meth:`wait`). All ranks call this together.

        Args:
            moment: what :attr:`saved` is from now on, unless writing fails.
        """
        self.saved = moment
        snapshot = Snapshot(tree, state.strategy.rank)
        ranks = self._writers(state, snapshot)
        if ranks is not None:
            write = functools.partial(self._write, name, snapshot, about, ranks)
            if self._asynchronous:
                self._background.start(state, snapshot, write)
            else:
                with seeding.preserved(devices=False):  # retries of remote stores draw random numbers
                    write()
        if not self._asynchronous:
            self.report(state)

    def _writers(self, state: State, snapshot: Snapshot) -> Ranks | None:
        """Return the ranks that write: all if there are shards, else rank 0; None on ranks that do not write."""
        strategy = state.strategy
        if not snapshot.sharded:
            return Ranks() if strategy.rank == 0 else None
        if not self._asynchronous:
            return Ranks(strategy.rank, strategy.world_size, state.bus.all_gather_object)
        if self._threads is None:
            self._threads = _of_a_thread(strategy.rank, strategy.world_size)
        return self._threads

    def _write(
        self,
        name: str,
        snapshot: Snapshot,
        about: Mapping[str, Any],
        ranks: Ranks,
        problem: Exception | None = None,
    ) -> None:
        with self.recorded():
            ranks.agree(lambda: _raise_if(problem))
            self._store.save(name, snapshot, about, ranks, self._owned.may_replace)
            if ranks.rank == 0:
                self._owned.written(name)
                self._retention.prune(self._store, self._owned)

    def settle(self) -> None:
        """Wait until the weights are copied, which the thread does first. Does nothing if they are, or without a thread."""
        self._background.settle()

    def wait(self, state: State) -> None:
        """Wait until the current write has ended, on all ranks, and report a failure."""
        if self._asynchronous:
            self._background.join()
            self.report(state)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an exception for :meth:`report`, instead of raising it on this rank or in this thread only."""
        try:
            yield
        except Exception as error:
            self._failure = error

    def report(self, state: State) -> None:
        """Raise CheckpointError on all ranks, or warn, if rank 0 has recorded a failure."""
        failure, self._failure = self._failure, None
        reason = state.bus.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
        if reason is None:
            return
        self.saved = None
        message = f"A checkpoint could not be written to {self._store}: {reason}"
        if self._on_error == "stop":
            raise CheckpointError(message) from failure
        warn(f"{message} Training continues without it.", RuntimeWarning)

    def close(self) -> None:
        """Wait for the checkpoint that is being written. A failure is a warning, because no rank may wait for others here."""
        self._background.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            message = f"A checkpoint could not be written to {self._store}: {failure}"
            warn(message, RuntimeWarning)


def _raise_if(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _of_a_thread(rank: int, size: int) -> Ranks:
    """Return ranks with a separate process group, created here on all of them, whose collectives do not mix with training's."""
    import torch.distributed as dist

    from hocket.basics.objects import pack, unpack

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # non-members get something else

    def gather(item: Any) -> list[Any]:
        items: list[Any] = [None] * size
        dist.all_gather_object(items, pack(item), group=group)
        return [unpack(item) for item in items]

    return Ranks(rank, size, gather)
