"""Write MDS, the format of mosaicml-streaming: shard files, and an index that is written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hocket.errors import ExistingFile, MissingPackage, WrongValue
from hocket_streaming.writing.columns import Columns

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

INDEX = "index.json"
#: Bytes of a shard file before compression, by default: the format's own.
SIZE_LIMIT = 1 << 26
#: Most bytes of a shard file, whose offsets are uint32.
LARGEST = 1 << 32
_HASHES = {"xxh64": xxhash.xxh64, **{name: getattr(hashlib, name) for name in ("sha1", "sha256")}}


class MDSFiles:
    """Makes shard files of samples that are encoded, and their entries in the index.

    Args:
        columns: the columns.
        compression: "zstd" or "zstd:7" with a level, or "" for none.
        hashes: checksums of files that the index has: xxh64, sha1, sha256.
        size_limit: bytes of a shard file before compression.
    """

    def __init__(
        self, columns: Columns, compression: str = "", hashes: Sequence[str] = ("xxh64",), size_limit: int = SIZE_LIMIT
    ) -> None:
        if unknown := sorted(set(hashes) - _HASHES.keys()):
            raise WrongValue(f"hashes={list(hashes)!r} has {unknown[0]!r}. Write some of: {', '.join(_HASHES)}.")
        if not 0 < size_limit <= LARGEST // 2:
            raise WrongValue(f"size_limit={size_limit} should be from 1 to {LARGEST // 2} bytes. Write 67108864.")
        self.columns, self.hashes, self.size_limit = columns, list(hashes), size_limit
        self._compress = compressor(compression)
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": compression or None,
            "hashes": self.hashes,
            "size_limit": size_limit,
            "column_names": list(columns.encodings),
            "column_encodings": list(columns.encodings.values()),
            "column_sizes": list(columns.sizes.values()),
        }
        self._head = json.dumps(self._config, sort_keys=True).encode()
        #: Bytes of a shard file without samples.
        self.empty = 8 + len(self._head)
        #: Bytes of a shard file for each sample beside those of the sample.
        self.beside = 4

    def files(self, number: int, samples: Sequence[bytes]) -> tuple[str, bytes, dict[str, Any]]:
        """Return the name of a shard file, its bytes, and its entry in the index."""
        offsets = np.zeros(len(samples) + 1, np.uint64)
        np.cumsum([len(sample) for sample in samples], out=offsets[1:])
        offsets += self.empty + self.beside * len(samples)
        if offsets[-1] >= LARGEST:
            raise WrongValue(
                f"Shard {number} of MDS would have {int(offsets[-1]):,} bytes, and its offsets end at {LARGEST:,}: a sample is "
                "too large. Write several smaller samples, or another format."
            )
        count = np.uint32(len(samples)).astype("<u4").tobytes()
        raw = b"".join([count, offsets.astype("<u4").tobytes(), self._head, *samples])
        name = f"shard.{number:05}.mds"
        entry = {**self._config, "samples": len(samples), "raw_data": self._about(name, raw), "zip_data": None}
        if self._compress is None:
            return name, raw, entry
        packed = self._compress(raw)
        name += ".zstd"
        entry["zip_data"] = self._about(name, packed)
        return name, packed, entry

    def _about(self, name: str, content: bytes) -> dict[str, Any]:
        hashes = {kind: _HASHES[kind](content).hexdigest() for kind in self.hashes}
        return {"basename": name, "bytes": len(content), "hashes": hashes}

    def index(self, entries: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the content of the index."""
        return json.dumps({"version": 2, "shards": list(entries)}, sort_keys=True).encode()


def compressor(compression: str) -> Any:
    """Return the function that compresses bytes, or None for no compression."""
    if not compression:
        return None
    kind, _, level = compression.partition(":")
    if kind != "zstd" or not (level or "3").isdigit() or not 1 <= int(level or 3) <= 22:
        raise WrongValue(
            f"compression={compression!r} is not known. Write 'zstd', or 'zstd:7' with a level from 1 to 22."
        )
    try:
        import zstandard
    except ModuleNotFoundError:
        raise MissingPackage(
            'compression="zstd" needs zstandard, which is not installed. Type: pip install zstandard'
        ) from None
    return zstandard.ZstdCompressor(int(level or 3)).compress


class MDSWriter:
    """Writes samples to an MDS data set in the order in which they come; use it as a context manager.

    Files have their names when they are complete, and the index is written last, unless the block ends with an error: then
    there is no data set. `hocket_streaming.write` shuffles, uses several processes and can be continued.

    Args:
        path: a folder or URL that has no data set.
        columns: encoding by name: bytes, str, int, json, uint8 to float64, ndarray, ndarray:float32, ndarray:float32:3,224,224.
        compression: "zstd" or "zstd:7" with a level; "" for none.
        hashes: checksums in the index: xxh64, sha1, sha256.
        size_limit: bytes of a shard file before compression.
        storage_options: of fsspec, for a URL.

    Raises:
        ExistingFile: there is a data set at this path.
        WrongValue: a column, or a value of a sample that does not fit its column.

    Example:
        >>> import hocket_streaming, numpy, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with hocket_streaming.MDSWriter(folder, columns={"x": "ndarray:float32", "label": "int"}) as out:
        ...     out.write({"x": numpy.ones(3, "float32"), "label": 7})
        >>> out.samples
        1
    """

    def __init__(
        self,
        path: str,
        columns: Mapping[str, str],
        *,
        compression: str = "",
        hashes: Sequence[str] = ("xxh64",),
        size_limit: int = SIZE_LIMIT,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._made = MDSFiles(Columns(columns), compression, hashes, size_limit)
        self._files = target(path, storage_options)
        refuse_existing(self._files, INDEX)
        self._entries: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._size = self._made.empty
        #: Samples written so far.
        self.samples = 0

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample, which has all the columns."""
        encoded = self._made.columns.encode(sample)
        size = len(encoded) + self._made.beside
        if self._samples and self._size + size > self._made.size_limit:
            self._flush()
        self._samples.append(encoded)
        self._size += size
        self.samples += 1

    def _flush(self) -> None:
        name, content, entry = self._made.files(len(self._entries), self._samples)
        self._files.write(name, content)
        self._entries.append(entry)
        self._samples, self._size = [], self._made.empty

    def __enter__(self) -> MDSWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._samples or not self._entries:
                self._flush()
            self._files.write(INDEX, self._made.index(self._entries))


def target(path: str, storage_options: Mapping[str, Any] | None = None) -> Files:
    """Return the files of a data set that is to be written."""
    from hocket_streaming.store.files import Files

    return Files(path, dict(storage_options) if storage_options else None)


def refuse_existing(files: Files, name: str) -> None:
    """Raise an error if there is a data set already."""
    if files.has(name):
        raise ExistingFile(
            f"There is a data set already: {files.url(name)}. Write to another folder, or remove this one."
        )
