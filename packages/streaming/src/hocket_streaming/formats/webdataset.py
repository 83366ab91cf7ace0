"""WebDataset: tar files in which files of the same name, up to the first dot, are a sample."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongFile
from hocket_streaming import checksums
from hocket_streaming.formats.common import BLOCK, Window, damaged
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
#: Bytes at the end of a tar file, which are zero.
_END = 1024
_META = re.compile(r"__[^/]*__($|/)")


def _samples(members: Iterable[tarfile.TarInfo]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yield the key of each sample, and where its files begin and how long they are, by extension."""
    key, files = "", dict[str, tuple[int, int]]()
    for member in members:
        match = _NAME.fullmatch(member.name)
        if not member.isreg() or match is None or _META.match(member.name):
            continue
        extension = match[2].lower()
        if match[1] != key:
            if files:
                yield key, files
            key, files = match[1], {}
        if extension in files:
            raise ValueError(f"{member.name} is there twice")
        files[extension] = member.offset_data, member.size
    if files:
        yield key, files


class _Stream:
    """A file of a store, read from its beginning to its end, with its checksum."""

    def __init__(self, files: Files, name: str, size: int) -> None:
        self.files, self.name, self.size, self.at, self.block = files, name, size, 0, memoryview(b"")
        self.checksum, self.end = checksums.started(), b""

    def read(self, count: int) -> bytes:
        taken = []
        while count > 0 and (self.block or self.at < self.size):
            if not self.block:
                data = self.files.read(self.name, self.at, min(BLOCK, self.size - self.at))
                self.checksum.update(data)
                self.end = (self.end + data)[-_END:]
                self.at, self.block = self.at + len(data), memoryview(data)
            taken.append(self.block[:count])
            self.block = self.block[len(taken[-1]) :]
            count -= len(taken[-1])
        return b"".join(taken)


class WebDataset(Shards):
    """Read tar files of WebDataset: a chunk is a file, and a sample a dict of bytes by extension, with its ``__key__``.

    Extensions are in lower case. Values are bytes: decode them in ``transform=``. Files of a sample follow each other in the
    tar file, as webdataset demands. Compressed tar files cannot be read by offset; unpack them first.

    Raises:
        hocket.errors.WrongFile: a tar file is damaged, or has a file twice.

    Example:
        >>> import io, pathlib, tarfile, tempfile
        >>> from hocket_streaming.formats.webdataset import WebDataset
        >>> from hocket_streaming.store.files import Files
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "000.tar"
        >>> with tarfile.open(file, "w") as tar:
        ...     for name, text in {"a.txt": b"do", "a.cls": b"0", "b.txt": b"re", "b.cls": b"1"}.items():
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(text)
        ...         tar.addfile(member, io.BytesIO(text))
        >>> shards = WebDataset(Files(str(file.parent)))
        >>> (chunk,) = shards.chunks()
        >>> shards.get(shards.open(chunk, memoryview(file.read_bytes())), 1)
        {'__key__': 'b', 'txt': b're', 'cls': b'1'}
    """

    indexed = False
    suffixes = (".tar",)

    def chunks_of(self, name: str, size: int) -> list[Chunk]:
        """Read a file, and return it with the number of its samples and its checksum; an empty one has no chunk."""
        stream = _Stream(self.files, name, size)
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 16) as tar:  # type: ignore[call-overload]
                samples = sum(1 for _ in _samples(_forgotten(tar)))
            while stream.read(BLOCK):
                pass
            if any(stream.end) or size < _END:
                raise ValueError("it is truncated, as it has no end mark")
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise WrongFile(f"{self.files.url(name)} is not a tar file of samples: {error}. Write it again.") from error
        checksum = f"{checksums.DEFAULT}:{stream.checksum.hexdigest()}"
        return [Chunk((Part(name, size),), samples, checksum)] if samples else []

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the bytes, and where the files of each sample are."""
        if len(data) != chunk.size:
            raise damaged(self, chunk, f"it has {len(data):,} bytes, not {chunk.size:,}")
        try:
            with tarfile.open(fileobj=Window(data), mode="r:") as tar:
                table = list(_samples(tar))
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise damaged(self, chunk, error) from error
        ends = [start + size for _, files in table for start, size in files.values()]
        if len(table) != chunk.samples or max(ends, default=0) > len(data):
            raise damaged(self, chunk, f"it has {len(table)} complete samples, not {chunk.samples}")
        return data, table

    def get(self, opened: Any, row: int) -> dict[str, Any]:
        """Return the files of a sample."""
        data, table = opened
        key, files = table[row]
        return {"__key__": key} | {name: bytes(data[start : start + size]) for name, (start, size) in files.items()}


def _forgotten(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a stream, which keeps none of them."""
    for member in tar:
        yield member
        tar.members = []  # type: ignore[attr-defined]
