"""A file of JSON lines in which, after a kill and a resume, every line of a run appears exactly once."""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hocket.basics import safe_files
from hocket.basics.run_files import strict


class LinesFile:
    """Append lines without buffering. A checkpoint records length and checksum; a resumed run truncates the file to them.

    Args:
        header: whether to begin a new file with a line that names the run, which the caller does otherwise.
    """

    def __init__(self, header: bool = False) -> None:
        self._header = header
        self._file: IO[bytes] | None = None
        #: Length and checksum of the file, or those recorded in the checkpoint.
        self.size = self._sum = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file and its checksum, empty before the first line."""
        return {"size": self.size, "sum": self._sum} if self.size else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore length and checksum, for :meth:`truncate`."""
        self.close()
        self.size, self._sum = state_dict.get("size", 0), state_dict.get("sum", 0)

    def truncate(self, path: Path, run: str) -> bytes:
        """Remove the lines written after the checkpoint, and return them. A file that was changed since is left as it is."""
        if os.path.lexists(path):
            safe_files.check(path.lstat(), path)
        owner = _owner(path)
        if not path.exists() or not (owner == run or (owner is None and self.size)):
            return b""
        with path.open("r+b") as file:
            if zlib.crc32(file.read(self.size)) != self._sum or file.tell() != self.size:
                return b""
            removed = file.read()
            file.truncate(self.size)
            return removed

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` can be called."""
        return self._file is not None

    def open(self, path: Path, run: str) -> None:
        """Open the file to append to it. A file of another run is renamed first."""
        path.parent.mkdir(exist_ok=True)
        if os.path.lexists(path):  # a pipe would be waited for, and what a link leads to is not this run's
            safe_files.check(path.lstat(), path)
        if _owner(path) not in (run, None):
            keep(path)
        self.size, self._sum = _mend(path)
        self._file = path.open("ab", buffering=0)
        if not self.size and self._header:
            self.write({"run": run})

    def check(self) -> None:
        """Raise FileNotFoundError if the open file was removed."""
        if self._file is not None and not Path(self._file.name).exists():
            raise FileNotFoundError(f"{self._file.name} was removed while the run wrote it, and its lines are lost")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Append lines to the open file. Raises OSError if the disk is full; the file is unchanged."""
        assert self._file is not None
        data = "".join([f"{encode(line)}\n" for line in lines]).encode()
        written = self._file.write(data)
        if written != len(data):  # the disk is full
            self._file.truncate(self.size)
            raise OSError(errno.ENOSPC, f"Only {written} of {len(data)} bytes could be written to {self._file.name}")
        self.size += len(data)
        self._sum = zlib.crc32(data, self._sum)


_encode = json.JSONEncoder(allow_nan=False, default=str).encode


def encode(value: Any) -> str:
    """Return JSON on one line, with non-finite numbers as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""
    try:
        return _encode(value)
    except ValueError:  # non-finite values, which are rare
        return _encode(strict(value))


def _owner(path: Path) -> str | None:
    """Return the run that the first line names, or None."""
    try:
        with safe_files.opened(path) as file:
            return str(safe_files.parsed(file.readline(1 << 20))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(path: Path) -> None:
    """Rename a file of an earlier run, in a folder that now belongs to this run."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.earlier-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    print(f"hocket: {path} belonged to an earlier run; its lines are kept in {kept.name}.", file=sys.stderr, flush=True)


def _mend(path: Path) -> tuple[int, int]:
    """Remove or complete the last line if a killed run left it incomplete. Return length and checksum of the file."""
    if not path.exists():
        return 0, 0
    with path.open("r+b") as file:
        content = file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            try:
                json.loads(content[complete:])
            except ValueError:
                content = content[:complete]
                file.truncate(complete)
            else:
                content += b"\n"
                file.write(b"\n")  # only the line break was missing
    return len(content), zlib.crc32(content)
