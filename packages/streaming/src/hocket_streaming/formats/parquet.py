"""Parquet: a chunk is a row group, fetched as the bytes of its columns and kept as Arrow, which is mapped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongFile, WrongValue
from hocket_streaming.formats.arrow import columns_of, row_of
from hocket_streaming.formats.common import damaged, pyarrow
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: Bytes of the end of a file that are read at first; of footers that are kept; between columns that are fetched as one.
_END, _KEPT, _GAP = 1 << 16, 1 << 24, 1 << 15


class Parquet(Shards):
    """Read Parquet: a chunk is a row group, and a sample a dict of its columns.

    Only the columns that are asked for are fetched. Values are as Arrow returns them to Python; lists of numbers are arrays of
    numpy. Files whose row groups are much larger than 100 MB shuffle badly and fill the cache: write them with smaller ones.

    Args:
        files: the files of the data set.
        columns: the columns of samples; None for all.

    Raises:
        hocket.errors.MissingPackage: pyarrow is not installed.
        hocket.errors.WrongValue: a column does not exist.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> from hocket_streaming.formats.parquet import Parquet
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> table = pyarrow.table({"note": ["do", "re", "mi"], "number": [0, 1, 2]})
        >>> pyarrow.parquet.write_table(table, folder / "notes.parquet", row_group_size=2)
        >>> files = Files(str(folder))
        >>> shards = Parquet(files, columns=["note"])
        >>> first, second = shards.chunks()
        >>> fetched = b"".join(files.read(part.file, part.start, part.size) for part in second.parts)
        >>> shards.get(shards.open(second, memoryview(shards.unpack(second, fetched))), 0)
        {'note': 'mi'}
    """

    suffixes = (".parquet",)

    def __init__(self, files: Files, *, columns: Sequence[str] | None = None) -> None:
        super().__init__(files)
        if isinstance(columns, str) or (
            columns is not None and (not columns or not all(isinstance(c, str) for c in columns))
        ):
            raise WrongValue(
                f"columns={columns!r} is not a list of names. Write columns=['text'], or leave it out for all."
            )
        self.columns = None if columns is None else list(columns)
        #: The ends of files, which say where everything is; read again where they are not kept.
        self._footers: dict[str, bytes] = {}

    def chunks_of(self, name: str, size: int) -> list[Chunk]:
        """Read the end of a file, and return its row groups."""
        pyarrow("The format 'parquet'")
        return self._groups(name, size, self._read_footer(name, size))

    def _read_footer(self, name: str, size: int) -> bytes:
        end = self.files.read(name, max(0, size - _END), min(size, _END))
        if size < 12 or end[-4:] != b"PAR1":
            why = "encrypted, which is not supported" if end[-4:] == b"PARE" else "truncated, or not a Parquet file"
            raise WrongFile(f"{self.files.url(name)} is {why}. Fetch or write it again.")
        length = int.from_bytes(end[-8:-4], "little") + 8
        if length > size:
            raise WrongFile(f"{self.files.url(name)} is damaged: its end says that it is longer. Fetch it again.")
        return end[-length:] if length <= len(end) else self.files.read(name, size - length, length)

    def _metadata(self, name: str, footer: bytes) -> Any:
        arrow = pyarrow("The format 'parquet'")
        try:
            return arrow.parquet.read_metadata(arrow.BufferReader(b"PAR1" + footer))
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise WrongFile(f"{self.files.url(name)} has a damaged end: {error}. Fetch or write it again.") from error

    def _groups(self, name: str, size: int, footer: bytes) -> list[Chunk]:
        about, chunks = self._metadata(name, footer), []
        if sum(map(len, self._footers.values())) + len(footer) <= _KEPT:
            self._footers[name] = footer
        leaves = self._leaves(name, about)
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            if not group.num_rows:
                continue
            columns = [group.column(leaf) for leaf in leaves]
            starts = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
            spans = sorted((start, start + c.total_compressed_size) for start, c in zip(starts, columns, strict=True))
            joined: list[list[int]] = []
            for begin, end in spans:
                if joined and begin - joined[-1][1] <= _GAP:
                    joined[-1][1] = max(joined[-1][1], end)
                else:
                    joined.append([begin, end])
            if not joined or joined[0][0] < 4 or joined[-1][1] > size:
                raise WrongFile(
                    f"{self.files.url(name)} is truncated: row group {number} ends beyond it. Fetch it again."
                )
            parts = tuple(Part(name, end - begin, begin) for begin, end in joined)
            stored = max(1, sum(column.total_uncompressed_size for column in columns))
            chunks.append(Chunk(parts, group.num_rows, stored=stored, extra=[number, size, len(footer), self.columns]))
        return chunks

    def _leaves(self, name: str, about: Any) -> list[int]:
        """Return the numbers of the stored columns; a column with fields is stored as several."""
        paths = [about.schema.column(number).path for number in range(about.num_columns)]
        if self.columns is None:
            return list(range(len(paths)))
        leaves = {
            column: [n for n, path in enumerate(paths) if f"{path}.".startswith(f"{column}.")]
            for column in self.columns
        }
        if lacking := [column for column, numbers in leaves.items() if not numbers]:
            there = ", ".join(dict.fromkeys(path.partition(".")[0] for path in paths))
            raise WrongValue(
                f"{self.files.url(name)} has no column {lacking[0]!r}. It has {there}: write columns= of these."
            )
        return sorted(number for numbers in leaves.values() for number in numbers)

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        """Return the row group as a file of Arrow."""
        arrow = pyarrow("The format 'parquet'")
        number, size, length, columns = chunk.extra
        name = chunk.parts[0].file
        footer = self._footers.get(name)
        if footer is None:
            footer = self.files.read(name, size - length, length)
            kept = {**self._footers, name: footer}  # a new one, since other threads may be reading it
            while len(kept) > 1 and sum(map(len, kept.values())) > _KEPT:
                del kept[next(iter(kept))]
            self._footers = kept
        source = _Parts(chunk.parts, fetched, size)
        try:
            file = arrow.parquet.ParquetFile(source, metadata=self._metadata(name, footer), pre_buffer=False)
            table = file.read_row_group(number, columns=columns, use_threads=False).combine_chunks()
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise damaged(self, chunk, error) from error
        return bytes(sink.getvalue())

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the columns, mapped."""
        arrow = pyarrow("The format 'parquet'")
        try:
            table = arrow.ipc.open_file(arrow.py_buffer(data)).read_all()
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise damaged(self, chunk, error) from error
        if table.num_rows != chunk.samples:
            raise damaged(self, chunk, f"it has {table.num_rows} rows, not {chunk.samples}")
        return columns_of(table)

    def get(self, opened: Any, row: int) -> dict[str, Any]:
        """Return a row as a dict of its columns."""
        return row_of(opened, row)


class _Parts(io.RawIOBase):
    """The parts of a file that were fetched, at their places in it."""

    def __init__(self, parts: Sequence[Part], fetched: bytes, size: int) -> None:
        self.size, self.at, self.ranges, begin = size, 0, [], 0
        for part in parts:
            self.ranges.append((part.start, memoryview(fetched)[begin : begin + part.size]))
            begin += part.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> memoryview:
        for start, data in self.ranges:
            if start <= self.at and self.at + size <= start + len(data) and size >= 0:
                taken = data[self.at - start : self.at - start + size]
                self.at += size
                return taken
        raise OSError(f"bytes {self.at:,} to {self.at + size:,} are outside of its columns")
