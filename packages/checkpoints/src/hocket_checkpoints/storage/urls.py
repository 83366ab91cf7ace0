"""Checkpoints by path or URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.basics.run_folder import is_url
from hocket_checkpoints.ranking import BEST
from hocket_checkpoints.storage.manifest import LATEST


@contextmanager
def local_folder(place: Path | str, only: Sequence[str] | None = None) -> Iterator[Path]:
    """Yield the folder of a checkpoint; for a URL, a temporary folder with the files that `format.read` reads.

    ``place`` may be the file ``latest`` of a folder of checkpoints, as in `resolved`, or ``best``.
    """
    place = resolved(place)
    if not is_url(place):
        yield Path(place)
        return
    from hocket_checkpoints.storage.store import Store

    folder, _, name = str(place).rstrip("/").rpartition("/")
    store = Store(folder)  # its downloads are removed with it
    yield store.fetch(name, only)


def resolved(place: Path | str) -> Path | str:
    """Return the checkpoint that ``latest`` or ``best`` in a folder of checkpoints stands for; any other path or URL unchanged.

    Raises CheckpointError as `Store.named`.
    """
    folder, _, name = str(place).rstrip("/").rpartition("/")
    if name not in (LATEST, BEST) or Path(place).is_dir() or (name == BEST and os.path.lexists(place)):
        return place
    from hocket_checkpoints.storage.store import Store

    return f"{folder or '.'}/{Store(folder or '.').named(name)}"
