"""MDS, the format of mosaicml-streaming: shards with an ``index.json``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from hocket.errors import Unsupported, WrongFile
from hocket_streaming import checksums
from hocket_streaming.formats import compression
from hocket_streaming.formats.common import below, damaged, index, offsets, whole
from hocket_streaming.formats.encodings import Columns, decoder
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files


class MDS(Shards):
    """Read MDS, the format of mosaicml-streaming; a chunk is a shard, and a sample a dict of its columns.

    Compressions are zstd, gz, bz2, br and snappy, and checksums those of ``index.json``. Columns have the types that
    mosaicml-streaming gives them; images need Pillow. Columns of pickles (``pkl``) are refused, since pickles can run code.

    Raises:
        hocket.errors.Unsupported: a column is pickled, or has an unknown encoding or compression.
        hocket.errors.WrongFile: ``index.json`` is damaged.

    Example:
        >>> import json, pathlib, struct, tempfile
        >>> from hocket_streaming.formats.mds import MDS
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> samples = [struct.pack("<I2sq", 2, text, number) for number, text in enumerate([b"do", b"re", b"mi"])]
        >>> starts = [20 + 14 * number for number in range(4)]
        >>> shard = struct.pack("<5I", 3, *starts) + b"".join(samples)
        >>> _ = (folder / "shard.00000.mds").write_bytes(shard)
        >>> about = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
        >>> columns = {"column_names": ["note", "number"], "column_encodings": ["str", "int"], "column_sizes": [None, 8]}
        >>> described = {"format": "mds", "samples": 3, "raw_data": about, "zip_data": None, "compression": None, **columns}
        >>> _ = (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [described]}))
        >>> shards = MDS(Files(str(folder)))
        >>> (chunk,) = shards.chunks()
        >>> shards.get(shards.open(chunk, memoryview(shard)), 2)
        {'note': 'mi', 'number': 2}
    """

    suffixes = (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2", ".mds.br", ".mds.snappy")

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether there is an ``index.json`` that lists shards."""
        return index(files, "shards") is not None

    def chunks(self) -> list[Chunk]:
        """Return the shards that ``index.json`` lists."""
        contents = index(self.files, "shards", last=True)
        if contents is None or not isinstance(contents["shards"], list):
            raise WrongFile(
                f"{self.files.url()} has no index.json that lists shards. Name the folder that has it, or merge the indexes of "
                "its folders with streaming.base.util.merge_index."
            )
        columns: dict[str, Any] = {}
        chunks = [self._chunk(shard, columns) for shard in contents["shards"]]
        return [chunk for chunk in chunks if chunk.samples]

    def _chunk(self, shard: Any, columns: dict[str, Any]) -> Chunk:
        if not isinstance(shard, dict) or shard.get("format") != "mds":
            kind = shard.get("format") if isinstance(shard, dict) else shard
            raise Unsupported(
                f"{self.files.url('index.json')} lists a shard of the format {kind!r}; supported is 'mds'."
            )
        try:
            described = [shard["column_names"], shard["column_encodings"], shard["column_sizes"]]
            raw, packed, algorithm = shard["raw_data"], shard.get("zip_data"), shard.get("compression")
            samples = whole(shard["samples"], "samples of a shard", self.files)
            size = whole(raw["bytes"], "bytes of a shard", self.files, 1)
            taken = packed or raw
            part = Part(below(taken["basename"], self.files), whole(taken["bytes"], "bytes of a shard", self.files, 1))
            if packed and self.files.local and not self.files.has(part.file):  # decompressed already
                packed, taken, part = None, raw, Part(below(raw["basename"], self.files), size)
            checksum = checksums.chosen(taken.get("hashes") or {})
        except (KeyError, TypeError, AttributeError) as error:
            raise WrongFile(f"{self.files.url('index.json')} is damaged: a shard has no valid {error}.") from error
        if packed:
            compression.check(algorithm)
        shared = columns.setdefault(
            repr((described, packed and algorithm)), [*described, algorithm if packed else None]
        )
        _columns(shared)
        return Chunk((part,), samples, checksum, size if packed else 0, shared)

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        """Return a shard decompressed."""
        algorithm = chunk.extra[3]
        if not algorithm:
            return fetched
        try:
            return compression.decompress(algorithm, fetched, chunk.stored)
        except WrongFile as error:
            raise damaged(self, chunk, error) from error

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the bytes, the offsets of samples, the names of columns, and what decodes their values."""
        return data, offsets(self, chunk, data).tolist(), chunk.extra[0], _columns(chunk.extra), chunk

    def get(self, opened: Any, row: int) -> dict[str, Any]:
        """Return a sample as a dict of its columns."""
        data, starts, names, columns, chunk = opened
        try:
            return dict(zip(names, columns.decode(data[starts[row] : starts[row + 1]]), strict=True))
        except (ValueError, IndexError, KeyError, struct.error, OSError) as error:
            raise damaged(self, chunk, f"sample {row} cannot be decoded: {error}") from error


def _columns(extra: Any) -> Columns:
    names, encodings, sizes, _ = extra
    if not len(names) == len(encodings) == len(sizes) or not all(
        isinstance(each, str) for each in (*names, *encodings)
    ):
        raise TypeError("list of columns")
    return Columns([decoder(kind, name) for name, kind in zip(names, encodings, strict=True)], sizes)
