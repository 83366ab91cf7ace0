"""Temporary folders for downloads of checkpoints. Those of a killed process are removed when the next one is created."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where folders of killed processes are not removed
    fcntl = None  # type: ignore[assignment]

_PREFIX = "hocket-scratch-"
#: Folder -> the descriptor whose lock shows that a living process uses it, and the id of the process that created it.
_held: dict[Path, tuple[int | None, int]] = {}


def begin() -> Path:
    """Return a new folder, for this user only, in the system's temporary folder."""
    _clean(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    descriptor = _lock(new)
    folder = new.with_name(new.name.removeprefix("."))
    new.rename(folder)  # only locked folders have the name that other processes clean up
    _held[folder] = descriptor, os.getpid()
    return folder


def end(folder: Path) -> None:
    """Remove a folder, unless another process made it."""
    descriptor, process = _held.pop(folder, (None, 0))
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def _clean(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        if (descriptor := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock while open; None if the lock is taken, or locks are unsupported."""
    if fcntl is None:
        return None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None
