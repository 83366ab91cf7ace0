"""JSON Lines and text: a chunk is a range of about a megabyte that ends with a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hocket.errors import WrongFile
from hocket_streaming import checksums
from hocket_streaming.formats import common, compression
from hocket_streaming.formats.common import BLOCK, damaged, positive
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hocket_streaming.store.files import Files

_PACKED = {".gz": "gz", ".zst": "zstd", ".bz2": "bz2"}
#: Whether a byte is more than space in a line.
_INK = np.ones(256, bool)
_INK[list(b" \t\r\n")] = False


def _lines(data: bytes | memoryview) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the lines begin and end that have more than space."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw == 10)
    if len(raw) and raw[-1] != 10:
        ends = np.append(ends, len(raw))
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    ink = np.concatenate(([0], np.cumsum(_INK[raw])))
    written = ink[ends] > ink[starts]
    return starts[written], ends[written]


def _algorithm(name: str) -> str:
    """Return how a file is compressed, "" if it is not."""
    return next((value for key, value in _PACKED.items() if name.endswith(key)), "")


class Lines(Shards):
    """The base of formats with a sample in each line. Lines without text are no samples.

    Args:
        files: the files of the data set.
        chunk_bytes: bytes of a chunk, about; a compressed file (``.gz``, ``.zst``, ``.bz2``) is one chunk.
    """

    indexed = False
    #: How names end, without that of a compression.
    endings: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.suffixes = tuple(ending + packed for ending in cls.endings for packed in ("", *_PACKED))

    def __init__(self, files: Files, *, chunk_bytes: int = 1 << 20) -> None:
        super().__init__(files)
        self.chunk_bytes = positive("chunk_bytes", chunk_bytes)

    def chunks_of(self, name: str, size: int) -> list[Chunk]:
        """Read a file, and return ranges that end with a line, with their checksums."""
        if not (algorithm := _algorithm(name)):
            return [
                Chunk((Part(name, len(data), at),), count, checksums.checksum(data))
                for at, data, count in self._ranges(name, size)
            ]
        packed = self.files.read(name)
        try:
            raw = compression.decompress(algorithm, packed)
        except WrongFile as error:
            raise WrongFile(f"{self.files.url(name)} is damaged: {error}. Fetch or write it again.") from error
        chunk = Chunk(
            (Part(name, len(packed)),), len(_lines(raw)[0]), checksums.checksum(packed), len(raw), [algorithm]
        )
        return [chunk] if chunk.samples else []

    def _ranges(self, name: str, size: int) -> Iterator[tuple[int, bytes, int]]:
        """Yield where a range begins, its bytes and its samples."""
        at, left = 0, b""
        for start in range(0, size, max(BLOCK, self.chunk_bytes)):
            read = min(max(BLOCK, self.chunk_bytes), size - start)
            left += self.files.read(name, start, read)
            last, begin = start + read == size, 0
            while begin < len(left):
                end = left.find(b"\n", min(begin + self.chunk_bytes, len(left)) - 1) + 1
                if not end:
                    if not last:
                        break
                    end = len(left)
                data = left[begin:end]
                if count := len(_lines(data)[0]):
                    yield at + begin, data, count
                begin = end
            at, left = at + begin, left[begin:]

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        """Return a compressed file as text."""
        if not chunk.extra:
            return fetched
        try:
            return compression.decompress(chunk.extra[0], fetched, chunk.stored)
        except WrongFile as error:
            raise damaged(self, chunk, error) from error

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the bytes, and where lines begin and end."""
        starts, ends = _lines(data)
        if len(data) != chunk.kept or len(starts) != chunk.samples:
            raise damaged(
                self, chunk, f"it has {len(starts)} lines in {len(data):,} bytes, not {chunk.samples} in {chunk.kept:,}"
            )
        return data, starts, ends, chunk

    def get(self, opened: Any, row: int) -> Any:
        """Return what a line says."""
        data, starts, ends, chunk = opened
        line = bytes(data[int(starts[row]) : int(ends[row])])
        try:
            return self.decode(line.removesuffix(b"\r"))
        except (ValueError, RecursionError) as error:
            raise damaged(self, chunk, f"the line of sample {row} ({line[:40]!r}) cannot be read: {error}") from error

    def decode(self, line: bytes) -> Any:
        """Return the sample of a line."""
        raise NotImplementedError


class JsonLines(Lines):
    """Read JSON Lines (``.jsonl``, ``.ndjson``): a sample is the value of a line, mostly a dict.

    Args:
        files: the files of the data set.
        chunk_bytes: bytes of a chunk, about; a compressed file (``.gz``, ``.zst``, ``.bz2``) is one chunk.

    Example:
        >>> import pathlib, tempfile
        >>> from hocket_streaming.formats.lines import JsonLines
        >>> from hocket_streaming.store.files import Files
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "notes.jsonl"
        >>> _ = file.write_text('{"note": "do"}\\n\\n{"note": "re"}\\n')
        >>> shards = JsonLines(Files(str(file.parent)))
        >>> (chunk,) = shards.chunks()
        >>> chunk.samples, shards.get(shards.open(chunk, memoryview(file.read_bytes())), 1)
        (2, {'note': 're'})
    """

    endings = (".jsonl", ".ndjson")

    def decode(self, line: bytes) -> Any:
        """Return the value."""
        return json.loads(line)


class Text(Lines):
    """Read text (``.txt``): a sample is a line as a string, without its end.

    Args:
        files: the files of the data set.
        extensions: how names of files end, such as ``["py", "md"]``; None for ``txt``, or for all files if none ends so.
        chunk_bytes: bytes of a chunk, about; a compressed file (``.gz``, ``.zst``, ``.bz2``) is one chunk.

    Example:
        >>> import pathlib, tempfile
        >>> from hocket_streaming.formats.lines import Text
        >>> from hocket_streaming.store.files import Files
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
        >>> _ = file.write_bytes(b"do\\nre\\nmi")
        >>> shards = Text(Files(str(file.parent)))
        >>> (chunk,) = shards.chunks()
        >>> chunk.samples, shards.get(shards.open(chunk, memoryview(file.read_bytes())), 2)
        (3, 'mi')
    """

    endings = (".txt",)

    def __init__(self, files: Files, *, extensions: Sequence[str] | None = None, chunk_bytes: int = 1 << 20) -> None:
        super().__init__(files, chunk_bytes=chunk_bytes)
        self.extensions = common.extensions_of(extensions)

    def data_files(self) -> dict[str, int]:
        """Return the files with these extensions."""
        names = Shards(self.files).data_files()
        return (self.extensions is None and super().data_files()) or common.of_extensions(names, self.extensions)

    def document(self, name: str) -> str:
        """Return the text of a file."""
        data = self.files.read(name)
        try:
            return self.decode(compression.decompress(kind, data) if (kind := _algorithm(name)) else data)
        except (WrongFile, UnicodeDecodeError) as error:
            raise WrongFile(
                f"{self.files.url(name)} is not text in UTF-8: {error}. Remove it from the source, or convert it."
            ) from error

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether there are files ``.txt``, none of them in a folder, whose name might be a class."""
        names = [name for name in files.listed() if name.endswith(cls.suffixes)]
        return bool(names) and not any("/" in name for name in names)

    def decode(self, line: bytes) -> str:
        """Return the text."""
        return line.decode().removeprefix("\ufeff")
