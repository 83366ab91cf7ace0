"""Checkpoints by path or URL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def local_folder(place: Path | str, only: Sequence[str] | None = None) -> Iterator[Path]:
    """Yield the folder of a checkpoint; for a URL, a temporary folder with the files that `format.read` reads."""
    if "://" not in str(place):
        yield Path(place)
        return
    from hocket.checkpoints.storage.store import Store

    folder, _, name = str(place).rstrip("/").rpartition("/")
    store = Store(folder)  # its downloads are removed with it
    yield store.fetch(name, only)
