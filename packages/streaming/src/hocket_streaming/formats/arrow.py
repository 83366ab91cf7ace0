"""Arrow IPC, as files and as streams: a chunk is a record batch, mapped as it is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import Unsupported, WrongFile, WrongValue
from hocket_streaming.formats.common import damaged, pyarrow
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: Kinds of messages, by their numbers in Arrow's format.
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_CONTINUED = b"\xff\xff\xff\xff"


def columns_of(table: Any, arrays: bool = True) -> list[tuple[str, Callable[[int], Any]]]:
    """Return the name of each column of a table of Arrow, and the function that returns a value of it, as a copy.

    Args:
        arrays: whether lists of numbers are arrays of numpy.
    """
    return [(name, _getter(table.column(number), arrays)) for number, name in enumerate(table.schema.names)]


def row_of(columns: list[tuple[str, Callable[[int], Any]]], row: int) -> dict[str, Any]:
    """Return a row of `columns_of`."""
    return {name: value(row) for name, value in columns}


def _getter(column: Any, arrays: bool) -> Callable[[int], Any]:
    import pyarrow.types as types

    if hasattr(column, "num_chunks") and column.num_chunks == 1:
        column = column.chunk(0)
    kind = column.type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not arrays or not lists or not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return lambda row: column[row].as_py()

    def numbers(row: int) -> Any:
        values = column[row].values
        return None if values is None else values.to_pylist() if values.null_count else values.to_numpy(False).copy()

    return numbers


def _field(table: bytes, at: int, number: int) -> int:
    """Return where a field of a flatbuffer's table is, or 0 without it; the table is at ``at``."""
    vtable = at - struct.unpack_from("<i", table, at)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", table, vtable)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", table, vtable + 4 + 2 * number)
    return at + offset if offset else 0


class Arrow(Shards):
    """Read Arrow IPC files and streams, such as those of Hugging Face Datasets: a chunk is a record batch.

    A sample is a dict of its columns. Values are as Arrow returns them to Python; lists of numbers are arrays of numpy.

    Args:
        files: the files of the data set.
        columns: the columns of samples; None for all. A chunk is fetched with all of its columns.

    Raises:
        hocket.errors.MissingPackage: pyarrow is not installed.
        hocket.errors.Unsupported: columns have dictionaries, which are in another place than the batch.

    Example:
        >>> import pathlib, tempfile
        >>> import pyarrow
        >>> from hocket_streaming.formats.arrow import Arrow
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> table = pyarrow.table({"note": ["do", "re", "mi"], "number": [0, 1, 2]})
        >>> with pyarrow.ipc.new_file(str(folder / "notes.arrow"), table.schema) as writer:
        ...     writer.write_table(table, max_chunksize=2)
        >>> files = Files(str(folder))
        >>> shards = Arrow(files)
        >>> first, second = shards.chunks()
        >>> data = memoryview(files.read("notes.arrow", second.parts[0].start, second.size))
        >>> shards.get(shards.open(second, data), 0)
        {'note': 'mi', 'number': 2}
    """

    indexed = False
    suffixes = (".arrow", ".feather")

    def __init__(self, files: Files, *, columns: Sequence[str] | None = None) -> None:
        super().__init__(files)
        if isinstance(columns, str) or (columns is not None and not all(isinstance(each, str) for each in columns)):
            raise WrongValue(
                f"columns={columns!r} is not a list of names. Write columns=['text'], or leave it out for all."
            )
        self.columns = None if columns is None else list(columns)
        self._schemas: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_schemas": {}}

    def chunks_of(self, name: str, size: int) -> list[Chunk]:
        """Read the heads of all messages, and return the record batches."""
        pyarrow("The format 'arrow'")
        where, chunks, schema = self.files.url(name), [], [0, 0]
        try:
            for kind, start, length, rows in self._messages(name, size):
                if start + length > size:
                    raise ValueError(f"a record ends at byte {start + length:,} of {size:,}")
                if kind == _DICTIONARY:
                    raise Unsupported(
                        f"{where} has a column with a dictionary. Write it with plain values (Table.cast)."
                    )
                if kind == _SCHEMA:
                    schema = [start, length]
                elif kind == _BATCH and rows:
                    chunks.append(Chunk((Part(name, length, start),), rows, extra=schema))
            if not schema[1]:
                raise ValueError("it has no schema")
        except (struct.error, ValueError, IndexError) as error:
            raise WrongFile(f"{where} is damaged, or not of Arrow: {error}. Fetch or write it again.") from error
        return chunks

    def _messages(self, name: str, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield kind, first byte, bytes and rows of each message."""
        at, head, begin = 0, b"", 0

        def part(start: int, count: int) -> bytes:
            nonlocal head, begin
            if not begin <= start or start + count > begin + len(head):
                begin, head = start, self.files.read(name, start, max(0, min(max(count, 1 << 14), size - start)))
            return head[start - begin : start - begin + count]

        if part(0, 8)[:6] == b"ARROW1":
            at = 8
        while at + 8 <= size:
            prefix = part(at, 8)
            length = int.from_bytes(prefix[4:], "little", signed=True)
            if prefix[:4] != _CONTINUED:
                raise ValueError("its messages are not those of Arrow 0.15 or later")
            if not length:
                return
            if not 0 < length <= min(size - at, 1 << 28):
                raise ValueError("it is truncated")
            message = part(at + 8, length)
            table = struct.unpack_from("<I", message)[0]
            kind_at, header_at, body_at = (_field(message, table, number) for number in (1, 2, 3))
            body = struct.unpack_from("<q", message, body_at)[0] if body_at else 0
            header = header_at + struct.unpack_from("<I", message, header_at)[0]
            rows_at = _field(message, header, 0) if message[kind_at] == _BATCH else 0
            rows = struct.unpack_from("<q", message, rows_at)[0] if rows_at else 0
            if body < 0 or rows < 0:
                raise ValueError("a record has a negative size")
            yield message[kind_at], at, 8 + length + body, rows
            at += 8 + length + body

    def _schema(self, chunk: Chunk) -> Any:
        name = chunk.parts[0].file
        if name not in self._schemas:
            arrow = pyarrow("The format 'arrow'")
            start, length = chunk.extra
            self._schemas[name] = arrow.ipc.read_schema(arrow.py_buffer(self.files.read(name, start, length)))
        return self._schemas[name]

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the columns, mapped."""
        arrow = pyarrow("The format 'arrow'")
        try:
            if len(data) != chunk.size:
                raise ValueError(f"it has {len(data):,} bytes, not {chunk.size:,}")
            message = arrow.ipc.read_message(arrow.py_buffer(data))
            batch = arrow.ipc.read_record_batch(message, self._schema(chunk))
            batch.validate()
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise damaged(self, chunk, error) from error
        if batch.num_rows != chunk.samples:
            raise damaged(self, chunk, f"it has {batch.num_rows} rows, not {chunk.samples}")
        if self.columns is not None:
            if lacking := set(self.columns) - set(batch.schema.names):
                there = ", ".join(batch.schema.names)
                raise WrongValue(f"There is no column {min(lacking)!r}. There are {there}: write columns= of these.")
            batch = batch.select(self.columns)
        return columns_of(batch)

    def get(self, opened: Any, row: int) -> dict[str, Any]:
        """Return a row as a dict of its columns."""
        return row_of(opened, row)
