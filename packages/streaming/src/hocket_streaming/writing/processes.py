"""Compute tasks in several processes, and end with all of them: nothing goes on when the command was killed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, cast

from hocket.errors import WrongState

T = TypeVar("T")
#: What this process computes.
_task: Callable[[int], object]


def _begin(task: Callable[[int], object]) -> None:
    """Leave Control-C to the process that began this one, and end with it."""
    global _task
    _task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compute(number: int) -> object:
    return _task(number)


def computed(task: Callable[[int], T], numbers: Sequence[int], workers: int) -> Iterator[tuple[int, T]]:
    """Yield the numbers with what the task returns for them, in the order in which they end.

    Args:
        workers: processes; 0 or 1 for this one.

    Raises:
        WrongState: a process ended. The errors of tasks are raised as they are.
    """
    if workers < 2 or len(numbers) < 2:
        for number in numbers:
            yield number, task(number)
        return
    pool = ProcessPoolExecutor(min(workers, len(numbers)), multiprocessing.get_context("spawn"), _begin, (task,))
    try:
        futures = {pool.submit(_compute, number): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], cast(T, future.result())
    except BrokenProcessPool:
        raise WrongState(
            "A process of the writer ended before its work: it was killed, perhaps for its memory, or a script that calls "
            "write() has no `if __name__ == '__main__':`. The same command continues; workers=1 takes less memory."
        ) from None
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
