"""Targets: the bytes of a sample on the way, and the files that are made of samples."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.errors import WrongValue
from hocket_streaming.formats.common import pyarrow
from hocket_streaming.writing.columns import Columns, infer, plain
from hocket_streaming.writing.mds import INDEX, LARGEST, SIZE_LIMIT, MDSFiles
from hocket_streaming.writing.runs import Filling

if TYPE_CHECKING:
    from hocket_streaming.writing.tokens import Tokenizing

#: What says how files of tokens are read.
TOKENS = "tokens.json"
FORMATS = ("mds", "parquet", "tokens")
Entry = dict[str, Any]


class Target:
    """The base of targets; objects are pickled into processes."""

    #: How samples are divided into files.
    filling: Filling
    #: The file that is written last, "" if there is none. It says that there is a data set.
    last = ""

    def encode(self, sample: Any) -> bytes:
        """Return the bytes of a sample, by which it is kept until its file is written."""
        raise NotImplementedError

    def file(self, number: int, count: int, samples: Sequence[bytes]) -> tuple[str, bytes, Entry]:
        """Return the name and content of one of ``count`` files, and what the last file says about it."""
        raise NotImplementedError

    def index(self, entries: Sequence[Entry]) -> bytes:
        """Return the content of the last file."""
        return b""


class MDSTarget(Target):
    """MDS shards.

    Args:
        columns: encodings by name.
    """

    last = INDEX

    def __init__(self, columns: Mapping[str, str], compression: str, hashes: Sequence[str], size_limit: int) -> None:
        self._options = (dict(columns), compression, tuple(hashes), size_limit)
        self._files = MDSFiles(Columns(columns), compression, hashes, size_limit)
        self.filling = Filling(size_limit, self._files.empty, self._files.beside)

    def __reduce__(self) -> Any:
        return MDSTarget, self._options

    def encode(self, sample: Any) -> bytes:
        return self._files.columns.encode(plain(sample))

    def file(self, number: int, count: int, samples: Sequence[bytes]) -> tuple[str, bytes, Entry]:
        return self._files.files(number, samples)

    def index(self, entries: Sequence[Entry]) -> bytes:
        return self._files.index(entries)


class ParquetTarget(Target):
    """Parquet files, in row groups that are chunks when they are read.

    Args:
        columns: encodings by name, as for MDS: samples are kept in that form until their file is written.
        types: the types of pyarrow, by name.
        group: bytes of a row group, about.
    """

    def __init__(
        self, columns: Mapping[str, str], types: Mapping[str, Any], compression: str, size: int, group: int
    ) -> None:
        self._options = (dict(columns), dict(types), compression, size, group)
        self._columns, self._types, self._compression, self._group = Columns(columns), dict(types), compression, group
        self.filling = Filling(size)

    def __reduce__(self) -> Any:
        return ParquetTarget, self._options

    def encode(self, sample: Any) -> bytes:
        return self._columns.encode(plain(sample))

    def file(self, number: int, count: int, samples: Sequence[bytes]) -> tuple[str, bytes, Entry]:
        arrow = pyarrow("Parquet")
        rows = [self._columns.decode(sample) for sample in samples]
        arrays = []
        for name, kind in self._types.items():
            try:
                arrays.append(arrow.array([_listed(row[name]) for row in rows], kind))
            except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
                raise WrongValue(
                    f"Column {name!r} is {kind} in the first samples, and a later sample does not fit: {error}. "
                    "Write MDS, or give all samples the same types."
                ) from None
        table = arrow.table(arrays, names=list(self._types))
        mean = max(1, sum(map(len, samples)) // max(1, len(samples)))
        buffer = io.BytesIO()
        kind, _, level = self._compression.partition(":")
        arrow.parquet.write_table(
            table,
            buffer,
            row_group_size=max(1, self._group // mean),
            compression=kind or "none",
            compression_level=int(level) if level else None,
        )
        return f"part-{number:05}-of-{count:05}.parquet", buffer.getvalue(), {"samples": len(rows)}


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim > 1 else value


class TokensTarget(Target):
    """Files of tokens, document after document, with an end-of-text token after each one.

    Args:
        tokenizing: turns a sample into tokens.
        length: tokens of a row; files but the last have whole rows.
        size: bytes of a file at most.
    """

    last = TOKENS

    def __init__(self, tokenizing: Tokenizing, length: int, size: int) -> None:
        self._tokenizing, self._length = tokenizing, length
        row = length * tokenizing.dtype.itemsize
        self.filling = Filling(max(row, size // row * row), cut=True)

    def encode(self, sample: Any) -> bytes:
        return self._tokenizing(plain(sample))

    def file(self, number: int, count: int, samples: Sequence[bytes]) -> tuple[str, bytes, Entry]:
        content = b"".join(samples)
        name = f"tokens.{number:05}.bin"
        return name, content, {"file": name, "tokens": len(content) // self._tokenizing.dtype.itemsize}

    def index(self, entries: Sequence[Entry]) -> bytes:
        about = {"format": "tokens", "dtype": self._tokenizing.dtype.name, "length": self._length}
        return json.dumps({**about, **self._tokenizing.about, "files": list(entries)}, indent=1).encode()


def target_for(
    format: str,
    first: Sequence[Any],
    columns: Mapping[str, str] | None,
    *,
    compression: str,
    hashes: Sequence[str],
    size_limit: int | None,
    group: int,
    tokenizer: str,
    length: int,
) -> Target:
    """Return the target for a format, by the first samples of the source and what is stated."""
    limit = SIZE_LIMIT if format == "mds" else 1 << 28
    limit = limit if size_limit is None else size_limit
    if not 0 < limit < LARGEST:
        raise WrongValue(
            f"«size_limit={size_limit}» should be from 1 to {LARGEST - 1} bytes. Write «size_limit=67108864»."
        )
    for name, value in (("tokenizer", tokenizer), ("length", length)):
        if value and format != "tokens":
            raise WrongValue(
                f"«{name}={value}» is for tokens, and the format is {format}. Write «format=tokens», or leave it out."
            )
    if format == "tokens":
        from hocket_streaming.writing.tokens import tokenizing

        if length < 1:
            raise WrongValue(
                f"«format=tokens» needs the number of tokens of a row, and has «length={length}». Write «length=2048»."
            )
        return TokensTarget(tokenizing(first, tokenizer), length, limit)
    if format not in FORMATS:
        raise WrongValue(f"format={format!r} cannot be written. Write one of: {', '.join(FORMATS)}.")
    encodings = infer(map(plain, first), columns)
    if format == "mds":
        return MDSTarget(encodings, compression, hashes, limit)
    types = {name: _type(name, kind, [plain(sample)[name] for sample in first]) for name, kind in encodings.items()}
    return ParquetTarget(encodings, types, compression, limit, group)


def _type(name: str, encoding: str, values: Sequence[Any]) -> Any:
    arrow = pyarrow("Parquet")
    kind, _, dtype = encoding.partition(":")
    simple = {"int": "int64", "bytes": "binary", "str": "string", "jpeg": "binary", "png": "binary"}
    if kind == "ndarray":
        found = {(np.asarray(value).dtype.name, np.asarray(value).ndim) for value in values}
        if len(found) != 1:
            raise WrongValue(
                f"Column {name!r} has arrays of several types: {sorted(found)}. Parquet has one: convert them, or write MDS."
            )
        ((dtype, axes),) = found
        result = arrow.from_numpy_dtype(np.dtype(dtype))
        for _ in range(axes):
            result = arrow.list_(result)
        return result
    if kind == "json":
        return arrow.array(values).type
    return arrow.type_for_alias(simple.get(kind, kind))
