"""Read data of a run beside the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hocket.data.source import Source


@contextmanager
def beside(source: Source) -> Iterator[Source]:
    """Leave data as they were, after an exception too: their position, and the generators of the loader and its samplers."""
    position = source.position()
    try:
        yield source
    finally:
        source.close()
        source.restore(position)
