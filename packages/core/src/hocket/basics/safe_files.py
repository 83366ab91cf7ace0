"""The one way to read a file that somebody else may have written, and to replace a file beside it.

Only regular files are read: a pipe would be waited for, and a device may never end. Bytes, lines and nesting are limited, and
a link can be kept from leading out of a folder. Temporary files have random names and are never opened if they exist.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hocket.errors import Mistake, WrongValue

#: Bytes of a file that is read at once, of a line of JSON, and levels of its nesting.
BYTES, LINE, DEPTH = 1 << 23, 1 << 23, 500
#: Bytes of lines that are read together.
BLOCK = 1 << 20
#: Maximum number of characters of a message: names inside files have any length.
_LONGEST = 10_000
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}  # fmt: skip


class UnsafeFileError(Mistake, OSError):
    """A file is not read because of what it is or how large it is; ``strerror`` says why."""

    def __init__(self, number: int, reason: str, file: str) -> None:
        OSError.__init__(self, number, reason, file)
        self.marked = str(self)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check(about: os.stat_result, path: Path | str) -> None:
    """Raise UnsafeFileError unless it is the status of a regular file."""
    if stat.S_ISDIR(about.st_mode):
        raise UnsafeFileError(errno.EISDIR, "Is a directory and not a regular file", str(path))
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "a special file")
        raise UnsafeFileError(errno.EINVAL, f"it is {kind} and not a regular file", str(path))


def opened(path: Path | str, within: Path | str | None = None, links: bool = True) -> BinaryIO:
    """Open a regular file to read it. Never waits.

    Args:
        within: a folder that links must not lead out of.
        links: whether the file itself may be a link.

    Raises:
        OSError: it cannot be opened; an UnsafeFileError if it is something else than a file to read.
    """
    try:
        place = os.fspath(path)
        if within is not None:
            place, folder = os.path.realpath(place), os.path.realpath(within)
            if os.path.commonpath([place, folder]) != folder:
                raise UnsafeFileError(errno.ELOOP, f"it is a link out of {within}", str(path))
        # Looked at first, because merely opening a device may act on it; and again, because it may have been replaced.
        check(os.stat(place, follow_symlinks=links), path)
        flags = os.O_RDONLY | (0 if links else getattr(os, "O_NOFOLLOW", 0))
        for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
            flags |= getattr(os, name, 0)
        file = os.fdopen(os.open(place, flags), "rb")
    except ValueError as error:  # a null byte, or another drive
        raise UnsafeFileError(errno.EINVAL, f"it cannot be read: {error}", str(path)) from None
    try:
        check(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def content(path: Path | str, most: int = BYTES, within: Path | str | None = None, links: bool = True) -> bytes:
    """Return the bytes of a regular file. Raises UnsafeFileError if there are more than ``most``; see :func:`opened`."""
    with opened(path, within, links) as file:
        size = os.fstat(file.fileno()).st_size
        raw = b"" if size > most else file.read(most + 1)
        if max(size, len(raw)) > most:
            text = f"it has {max(size, len(raw)):,} bytes; at most {most:,} are read"
            raise UnsafeFileError(errno.EFBIG, text, str(path))
        return raw


def text(path: Path | str, most: int = BYTES, within: Path | str | None = None) -> str:
    """Return the text of a regular file in UTF-8, with line ends as ``\\n``; see :func:`content`. Raises UnicodeDecodeError."""
    return content(path, most, within).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def blocks(path: Path | str, within: Path | str | None = None) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a file without their ends, many at a time, and whether they had one: the last may be truncated.

    Raises UnsafeFileError at a line that is too long; see :func:`opened`.
    """
    with opened(path, within) as file:
        left = b""
        while block := file.read(BLOCK):
            *lines, left = (left + block).split(b"\n")
            if len(left) > LINE:
                raise UnsafeFileError(errno.EFBIG, f"a line has more than {LINE:,} bytes", str(path))
            if lines:
                yield lines, True
        if left:
            yield [left], False


def parsed(raw: bytes | str) -> Any:
    """Return the value of JSON. Raises ValueError if it is none, or nested too deeply."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise WrongValue(f"it is nested in more than {DEPTH} levels") from None
    opening = ("[", "{") if isinstance(raw, str) else (b"[", b"{")
    if sum(map(raw.count, opening)) > DEPTH and _is_deep(value):  # type: ignore[arg-type]
        raise WrongValue(f"it is nested in more than {DEPTH} levels")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


@contextmanager
def replacing(path: Path | str, mode: int | None = None) -> Iterator[BinaryIO]:
    """Write a file that replaces another one when it is complete, or not at all. Links there are replaced, not followed.

    Args:
        mode: the permissions; those that the umask leaves unless given.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        raise UnsafeFileError(errno.EISDIR, "it is a folder, and no file replaces it", str(path))
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}")
    file = open(temporary, "xb")  # noqa: SIM115  (fails if there is anything, and follows no link)
    try:
        with file:
            yield file
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def replace(path: Path | str, text: str) -> None:
    """Write a text into a file at once; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def printable(text: str) -> str:
    """Return text that is safe for a terminal: unprintable characters but line ends are escaped, and long text is shortened."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … {text[-half:]}"
    return escaped(text)


def escaped(text: str) -> str:
    """Return text with unprintable characters but line ends escaped, since they may control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
