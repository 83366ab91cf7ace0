"""Publish a checkpoint atomically, from the temporary folder beside it, so that it survives a power failure."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hocket.errors import CheckpointError
from hocket_checkpoints.storage import manifest as manifests
from hocket_checkpoints.storage.manifest import FILES


def check_target(path: Path) -> None:
    """Raise CheckpointError if the path exists and is not a checkpoint."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path} is not a folder, and is not replaced by a checkpoint. Give another name.")
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if manifests.NAME not in names and (foreign := sorted(name for name in names if not FILES.fullmatch(name))):
            raise CheckpointError(
                f"{path} is not a checkpoint (it has {foreign[0]}), and is not replaced. Give another name."
            )


def publish(temporary: Path, path: Path) -> None:
    """Move the files to their final folder. File names depend on content, so new files can coexist with those they replace."""
    if not path.exists():
        temporary.rename(path)
        flush(path.parent)
        return
    for entry in temporary.iterdir():
        if entry.name != manifests.NAME:
            entry.replace(path / entry.name)
    flush(path)
    (temporary / manifests.NAME).replace(path / manifests.NAME)
    flush(path)
    kept = manifests.load(path).files
    for entry in path.iterdir():
        if FILES.fullmatch(entry.name) and entry.name not in kept:
            entry.unlink(missing_ok=True)


def write_file(path: Path, raw: bytes) -> None:
    """Write a new file, and flush it to the disk."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def flush(folder: Path) -> None:
    """Flush the names of a folder's entries to the disk."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def errors(path: Path) -> Iterator[None]:
    """Raise OSErrors as a CheckpointError that says that the checkpoint was not written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} was not written: {reason(error, path)}.") from error


def reason(error: OSError, path: Path) -> str:
    """Return why writing to ``path`` failed, without a full stop."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error.strerror or error)
    there = next((folder for folder in path.absolute().parents if folder.exists()), Path())
    return f"the disk is full ({shutil.disk_usage(there).free / 1e6:.1f} MB are free at {there})"
