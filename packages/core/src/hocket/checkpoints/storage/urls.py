"""Checkpoints by path or URL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def local_folder(place: Path | str, only: Sequence[str] | None = None) -> Iterator[Path]:
    """The folder of a checkpoint; of one behind a URL, a folder with what `format.read` reads of it, until the block ends."""
    if "://" not in str(place):
        yield Path(place)
        return
    from hocket.checkpoints.storage.store import Store

    folder, _, name = str(place).rstrip("/").rpartition("/")
    store = Store(folder)  # what it downloads goes with it
    yield store.fetch(name, only)
