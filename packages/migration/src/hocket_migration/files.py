"""Files by path, or by any URL that fsspec reaches."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.basics.run_folder import is_url
from hocket.errors import MissingPackage


def _file_system(url: Any) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(os.fspath(url))
    except ImportError as error:
        raise MissingPackage(
            f"{os.fspath(url)} cannot be reached: {error}. Install fsspec, and its package for such addresses."
        ) from error
    return file_system, path


def write(saved: Any, path: Any) -> None:
    """Write an object with torch.save, atomically."""
    import torch

    if is_url(path):
        file_system, name = _file_system(path)
        content = io.BytesIO()
        torch.save(saved, content)
        file_system.makedirs(file_system._parent(name), exist_ok=True)
        with file_system.transaction, file_system.open(name, "wb") as file:
            file.write(content.getvalue())
        return
    target = Path(os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.replacing(target) as file:
        torch.save(saved, file)


def opened(path: Any) -> Any:
    """Return a file that can be read: its content, if it is remote. Raises FileNotFoundError if there is none."""
    if not is_url(path):
        file = Path(os.fspath(path))
        if not file.exists():
            raise FileNotFoundError(file)
        return file
    file_system, name = _file_system(path)
    return io.BytesIO(file_system.cat_file(name))


def remove(path: Any) -> None:
    """Delete a file or folder, if it exists."""
    if is_url(path):
        file_system, name = _file_system(path)
        if file_system.exists(name):
            file_system.rm(name, recursive=True)
        return
    target = Path(path)
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)


def named_by(file_system: Any, path: str) -> str:
    """Return the path of a file system's file, as a URL unless it is on this machine."""
    local = "file" in (file_system.protocol if isinstance(file_system.protocol, tuple) else (file_system.protocol,))
    return path if local else str(file_system.unstrip_protocol(path))


def modified(path: Any) -> float:
    """Return the time of the last change, in seconds."""
    if is_url(path):
        file_system, name = _file_system(path)
        return float(file_system.modified(name).timestamp())
    return os.path.getmtime(path)
