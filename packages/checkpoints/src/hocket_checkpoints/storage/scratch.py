"""Temporary folders. Those of a killed process are removed when the next one is created in the same place."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where folders of killed processes are not removed
    fcntl = None  # type: ignore[assignment]

#: Folder -> the descriptor whose lock shows that a living process uses it, and the id of the process that created it.
_held: dict[Path, tuple[int | None, int]] = {}


def begin(parent: Path | None = None, prefix: str = "hocket-scratch-") -> Path:
    """Return a new folder, for this user only, in a folder, by default the system's temporary one."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        if (descriptor := _lock(folder)) is not None:  # of a killed process
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
    while True:
        new = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        _held[new] = _lock(new, wait=True), os.getpid()
        if new.exists():  # else another process has removed it before it was locked
            return new
        end(new)


def end(folder: Path) -> None:
    """Remove a folder, unless another process made it."""
    descriptor, process = _held.pop(folder, (None, 0))
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Return a descriptor that holds the folder's lock while open; None if the lock is taken, or locks are unsupported."""
    if fcntl is None:
        return None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return descriptor
        except OSError:
            os.close(descriptor)
    return None
