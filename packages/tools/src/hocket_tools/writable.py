"""Folders and files to write: refused before the work for them, and said in one line if the disk fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        raise WrongFile(
            f"{path} cannot be written: {reason}. Give another folder, or make room in this one{then}."
        ) from error


def check_writable(path: str | Path) -> None:
    """Raise WrongFile unless a file or folder can be written there: make a folder in the nearest that exists, and remove it."""
    whole = Path(path).expanduser().absolute()
    nearest = next(each for each in (whole.parent, *whole.parents) if os.path.lexists(each))
    with writing(path):
        probe = nearest / f".{os.urandom(8).hex()}"
        probe.mkdir()
        probe.rmdir()
