"""Folders and files to write: refused before the work for them, and said in one line if the disk fails."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hocket.basics.run_files import CONFIG, MARK
from hocket.errors import ExistingFile, Mistake, WrongFile
from hocket_checkpoints.storage import scratch

#: The files of runs and checkpoints in a folder, and in that of several, which nobody is advised to remove.
_OF_RUNS = tuple(f"{above}{name}" for above in ("", "*/") for name in (MARK, CONFIG, "manifest.json"))

#: The endings of files of weights, of graphs and of tables.
_FILES = (".onnx", ".pt2", ".pt", ".pth", ".bin", ".safetensors", ".npz", ".npy", ".parquet", ".jsonl", ".json", ".csv")


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
        scratch.end(scratch.begin(nearest, ".hocket-probe-"))


def check_place(path: Path, ours: bool, what: str, is_file: bool = False) -> None:
    """Raise ExistingFile for anything there but an empty folder, or a result of ours, which alone is replaced.

    Args:
        ours: whether what is there, if anything, is such a result.
        what: such a result, for the message.
        is_file: whether a file is to be written, and not a folder.

    Raises WrongFile if nothing can be written there, and for a folder that is named like a file.
    """
    if path.suffix in _FILES and not (is_file or os.path.lexists(path)):
        raise WrongFile(f"{path} is named like a file, and a folder is written. Give {path.with_suffix('')}.")
    if os.path.lexists(path) and not ours and not (path.is_dir() and not any(path.iterdir())):
        kept = path in (Path.cwd(), *Path.cwd().parents) or any(any(path.glob(each)) for each in _OF_RUNS)
        raise ExistingFile(
            f"{path} is there, and is not {what}, which alone is replaced, --overwrite or not. Give another path"
            f"{', since this one has files of runs or is the working folder' if kept else ', or remove it'}."
        )
    check_writable(path)


def check_other(path: Path, what: str, overwrite: bool) -> None:
    """Raise ExistingFile for a result of something else, ``what`` unless that is empty, which may not be replaced."""
    if what and not overwrite:
        raise ExistingFile(
            f"{path} has {what}. Give another path to keep both, or replace it: --overwrite on the command line, "
            "overwrite=True in Python, overwrite: true in YAML."
        )


def exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once. Return False where the system or its disk cannot, or one does not exist."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):  # Linux: AT_FDCWD, and RENAME_EXCHANGE
        return bool(libc.renameat2(-100, paths[0], -100, paths[1], 2) == 0)
    return bool(hasattr(libc, "renamex_np") and libc.renamex_np(*paths, 2) == 0)  # macOS: RENAME_SWAP
