"""Folders and files to write: refused before the work for them, and said in one line if the disk fails."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hocket.errors import Mistake, WrongFile


@contextmanager
def writing(path: str | Path, then: str = "") -> Iterator[None]:
    """Raise WrongFile, which names the path, where a file cannot be written: a full disk, or one that is read-only.

    Args:
        then: the end of the sentence that says what to do.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, Mistake):
            raise
        reason = getattr(error, "strerror", None) or error
        # An error of safetensors has no number.
        full = getattr(error, "errno", errno.ENOSPC) in (errno.ENOSPC, errno.EDQUOT)
        advice = f"make room in this one{then}" if full else "make this one writable"
        raise WrongFile(f"{path} cannot be written: {reason}. Give another folder, or {advice}.") from error


def check_writable(path: str | Path) -> None:
    """Raise WrongFile unless a file or folder can be written there: make a folder in the nearest that exists, and remove it."""
    whole = Path(path).expanduser().absolute()
    nearest = next(each for each in (whole.parent, *whole.parents) if os.path.lexists(each))
    with writing(path):
        probe = nearest / f".{os.urandom(8).hex()}"
        probe.mkdir()
        probe.rmdir()


def exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once. Return False where the system or its disk cannot, or one does not exist."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):  # Linux: AT_FDCWD, and RENAME_EXCHANGE
        return bool(libc.renameat2(-100, paths[0], -100, paths[1], 2) == 0)
    return bool(hasattr(libc, "renamex_np") and libc.renamex_np(*paths, 2) == 0)  # macOS: RENAME_SWAP
