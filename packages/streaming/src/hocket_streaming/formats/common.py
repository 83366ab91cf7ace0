"""What several formats need: names that stay below the root, offsets of samples, errors."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from hocket.basics import safe_files
from hocket.errors import MissingPackage, WrongFile, WrongValue
from hocket.help import installing
from hocket_streaming.errors import DamagedData

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hocket_streaming.shards import Chunk, Shards
    from hocket_streaming.store.files import Files

#: Bytes that are read at once of a file that is read from its beginning to its end.
BLOCK = 1 << 23


#: The indexes that ``serves`` read, until they are read again for the last time; they may have megabytes.
_READ: WeakKeyDictionary[Files, Any] = WeakKeyDictionary()


def index(files: Files, key: str, last: bool = False) -> dict[str, Any] | None:
    """Return ``index.json`` if there is one with this key, else None.

    Args:
        last: whether nobody asks for it again. Otherwise it is kept, and not read again.

    Raises:
        hocket.errors.WrongFile: it is not JSON.
    """
    if files not in _READ and not files.has("index.json"):
        return None
    try:
        value = _READ.pop(files) if files in _READ else safe_files.parsed(files.read("index.json"))
    except ValueError as error:
        raise WrongFile(f"{files.url('index.json')} is not JSON: {error}. Write the data set again.") from error
    if not last:
        _READ[files] = value
    return value if isinstance(value, dict) and key in value else None


def below(name: Any, files: Files) -> str:
    """Return the path of a file that an index names, if it stays below the root."""
    if (
        not isinstance(name, str)
        or not name
        or "\\" in name
        or ":" in name
        or ".." in name.split("/")
        or name[0] == "/"
    ):
        raise WrongFile(
            f"The index of {files.url()} names the file {name!r}, which is not below it. Write the index again."
        )
    return name


def whole(value: Any, what: str, files: Files, least: int = 0) -> int:
    """Return a number of an index that has to be an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise WrongFile(
            f"The index of {files.url()} has {value!r} for {what}, which has to be an integer of {least} or more."
        )
    return value


def damaged(shards: Shards, chunk: Chunk, why: object) -> DamagedData:
    """Return the error for a chunk whose bytes are not what its format says."""
    part = chunk.parts[0]
    place = f" from byte {part.start:,} on" if part.start else ""
    return DamagedData(
        f"{shards.files.url(part.file)}{place} is damaged, or is not what its index says: {why}. Fetch or write it again; "
        "`hocket data check` names every damaged file."
    )


def missing(what: str, command: str) -> MissingPackage:
    """Return the error for a library that is not installed."""
    return MissingPackage(f"{what}, which is not installed. Type: {command}")


def pyarrow(what: str) -> Any:
    """Import pyarrow, with its formats of files."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise missing(f"{what} needs pyarrow", installing.command("parquet", "hocket-streaming")) from error
    return pyarrow


def offsets(shards: Shards, chunk: Chunk, data: memoryview) -> NDArray[np.uint32]:
    """Return where each sample begins, and the last one ends, in a chunk that starts with their number and these offsets."""
    table = np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    count = int(table[0]) if len(table) else -1
    found = table[1 : count + 2]
    if count != chunk.samples or len(found) != count + 1:
        raise damaged(shards, chunk, f"it has {count} samples, not {chunk.samples}")
    if int(found[0]) < 4 * (count + 2) or int(found[-1]) != len(data) or bool(np.any(found[1:] < found[:-1])):
        raise damaged(
            shards, chunk, f"its offsets of samples are not in order, or do not end at its {len(data):,} bytes"
        )
    return found


def positive(name: str, value: Any) -> int:
    """Return an option that has to be a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WrongValue(f"{name}={value!r} is not a positive integer. Write for example {name}={2048}.")
    return value


def extensions_of(value: Any) -> list[str] | None:
    """Return the option ``extensions``, without dots."""
    if isinstance(value, str) or (value is not None and not all(isinstance(each, str) for each in value)):
        raise WrongValue(f"extensions={value!r} is not a list of endings. Write extensions=['jpg', 'png'].")
    return None if value is None else [each.lower().removeprefix(".") for each in value]


def of_extensions(names: Mapping[str, int], extensions: Sequence[str] | None) -> dict[str, int]:
    """Return the files whose names end so; all for None."""
    allowed = ("",) if extensions is None else tuple(f".{each}" for each in extensions)
    return {name: size for name, size in names.items() if name.lower().endswith(allowed)}


class Window(io.RawIOBase):
    """Bytes in memory as a file that libraries read, without a copy of all of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        taken = self._data[self._at : self._at + len(buffer)]
        buffer[: len(taken)] = taken
        self._at += len(taken)
        return len(taken)
