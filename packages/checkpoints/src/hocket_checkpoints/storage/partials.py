"""Temporary folders beside checkpoints. Their names identify the writing process, so that no other removes them meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from pathlib import Path

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)-(?P<pid>\d+)-(?P<token>[0-9a-f]{16})\.partial")
#: Seconds after which the folder of a process that may still run, such as one on another host, counts as abandoned.
OLD = 24 * 3600.0
#: Folders that this process is writing.
_writing: set[str] = set()


def begin(path: Path) -> Path:
    """Create a temporary folder beside ``path``."""
    folder = _beside(path)
    _writing.add(folder.name)
    folder.mkdir(parents=True)
    return folder


def aside(path: Path) -> Path:
    """Atomically rename the folder to a temporary name before deleting it."""
    folder = _beside(path)
    path.rename(folder)
    return folder


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{_host()}-{os.getpid()}-{os.urandom(8).hex()}.partial"


def end(folder: Path) -> None:
    """Remove a temporary folder."""
    shutil.rmtree(folder, ignore_errors=True)
    _writing.discard(folder.name)


def clean(parent: Path) -> list[Path]:
    """Remove the temporary folders of dead writers, and return them."""
    gone = [entry for entry in parent.glob(".*.partial") if entry.is_dir() and _abandoned(entry)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _abandoned(folder: Path) -> bool:
    found = _NAME.fullmatch(folder.name)
    if found is None or folder.name in _writing:
        return False
    pid = int(found["pid"])
    if found["host"] == _host() and (pid == os.getpid() or not _runs(pid)):
        return True
    try:
        return time.time() - folder.stat().st_mtime > OLD
    except FileNotFoundError:
        return False


def _host() -> str:
    return re.sub(r"[^\w]", "_", socket.gethostname())


def _runs(pid: int) -> bool:
    if os.name != "posix":  # where signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
