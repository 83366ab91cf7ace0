"""What is asked of a store for several files at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def in_threads(function: Callable[[In], Out], items: Iterable[In], threads: int = 16) -> list[Out]:
    """Return ``[function(item) for item in items]``, computed in threads; after an error no further one is begun."""
    tasks = list(items)
    if len(tasks) < 2:
        return list(map(function, tasks))
    pool = ThreadPoolExecutor(min(threads, len(tasks)))
    try:
        return list(pool.map(function, tasks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
