"""The chunks of litdata, with their ``index.json``. Nothing is unpickled."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.basics import safe_files
from hocket.errors import Unsupported, WrongFile, WrongValue
from hocket_streaming.formats import compression
from hocket_streaming.formats.arrow import columns_of, row_of
from hocket_streaming.formats.common import below, damaged, index, offsets, positive, pyarrow, whole
from hocket_streaming.formats.encodings import Columns, Decoder, image_file, of_bytes, raw_image
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: The types of tensors and of arrays by litdata's numbers.
_TENSORS = [
    "float32",
    "float32",
    "float64",
    "float64",
    "complex64",
    "complex64",
    "complex128",
    "complex128",
    "float16",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int16",
    "int32",
    "int32",
    "int64",
    "int64",
    "bool",
    "uint16",
]
_ARRAYS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
#: How chunks begin whose samples are compressed in frames, and end that have a table; how much they may grow, about.
_FRAMED, _FOOTER, _GROWTH = b"LDFZ01\0\0", b"LDARW01\0", 4


def _tensor(data: bytes) -> Any:
    number, dimensions = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{dimensions}I", data, 8)
    return _flat_tensor(number)(data[8 + 4 * dimensions :]).reshape(shape)


def _flat_tensor(number: int) -> Decoder:
    name = _TENSORS[number]

    def decode(data: bytes) -> Any:
        import torch  # only samples with tensors need it

        kind = getattr(torch, name)
        return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)

    return decode


def _array(data: bytes) -> Any:
    number, dimensions = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{dimensions}I", data, 8)
    return _flat_array(number)(data[8 + 4 * dimensions :]).reshape(shape)


def _flat_array(number: int) -> Decoder:
    dtype = np.dtype(_ARRAYS[number])
    return lambda data: np.frombuffer(data, dtype).copy()


def _images(data: bytes) -> list[Any]:
    (count,) = struct.unpack_from("<I", data)
    at, images = 4 + 4 * count, []
    for size in struct.unpack_from(f"<{count}I", data, 4):
        images.append(image_file(data[at : at + size]))
        at += size
    return images


def _json(data: bytes) -> Any:
    if data[:1] <= b"\x20":  # litdata's own tags of nested values
        raise Unsupported("a column of litdata's nested values; write it as a string of JSON")
    return json.loads(data)


_DECODERS: dict[str, Decoder] = {
    "str": bytes.decode, "text": bytes.decode, "bytes": bytes, "pil": raw_image, "jpeg": image_file, "image": image_file,
    "jpeg_array": _images, "numpy": _array, "tensor": _tensor, "json": _json,
    "bool": lambda data: data[0] != 0,
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    **dict.fromkeys(("file", "video", "audio", "nifti", "mesh", "pdf", "tifffile"), bytes),
}  # fmt: skip
_FLAT = {"no_header_tensor": (_flat_tensor, _TENSORS), "no_header_numpy": (_flat_array, _ARRAYS)}


def _decoder(kind: Any) -> Decoder:
    """Return the function that decodes values of a serializer of litdata, such as ``"int"`` or ``"no_header_numpy:3"``."""
    name, _, rest = str(kind).partition(":")
    if name in ("pickle", "graph"):
        raise Unsupported(
            f"A column is pickled (serializer '{name}'). Pickles of a data set can run code and are never read: write it with "
            "numbers, strings, bytes, arrays or tensors."
        )
    if name in _FLAT and rest.isdigit() and int(rest) < len(_FLAT[name][1]):
        return _FLAT[name][0](int(rest))
    if name in _DECODERS:
        return _DECODERS[name] if name in ("numpy", "tensor") else of_bytes(_DECODERS[name])
    raise Unsupported(
        f"A column has litdata's serializer {kind!r}. Supported are {', '.join(sorted((*_DECODERS, *_FLAT)))}."
    )


def _structure(spec: Any) -> Any:
    """Return the structure of samples: None for a value, else the type's name, its keys and what is inside."""
    kind, inside = spec["type"], [_structure(each) for each in spec["children_spec"]]
    if kind is None:
        return None
    short = kind.rpartition(".")[2]
    if short not in ("dict", "OrderedDict", "list", "tuple"):
        raise Unsupported(f"Samples have the structure {kind}. Supported are dict, list and tuple: write them so.")
    keys = json.loads(spec["context"]) if "ict" in short else list(range(len(inside)))
    if len(keys) != len(inside):
        raise ValueError("a structure with other keys than values")
    return [short, keys, inside]


def _built(structure: Any, values: Iterator[Any]) -> Any:
    if structure is None:
        return next(values)
    kind, keys, inside = structure
    built = [_built(each, values) if each else next(values) for each in inside]
    if kind in ("list", "tuple"):
        return built if kind == "list" else tuple(built)
    return dict(zip(keys, built, strict=True))


class Litdata(Shards):
    """Read the chunks that litdata's ``optimize`` writes; samples have the structure in which they were written.

    Numbers, strings, bytes, arrays and tensors are as litdata returns them. Images are PIL images, where litdata decodes JPEG
    to tensors; files, audio, video and the like are their bytes. Pickled columns are refused, since pickles can run code.
    litdata stores no checksums: ``hocket data index`` adds them.

    Args:
        files: the files of the data set.
        length: tokens of a sample, for data that were written with ``TokensLoader``.

    Raises:
        hocket.errors.Unsupported: a column is pickled, or chunks are encrypted or compressed in parts.
        hocket.errors.WrongFile: ``index.json`` is damaged.

    Example:
        >>> import json, pathlib, struct, tempfile
        >>> from hocket_streaming.formats.litdata import Litdata
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> samples = [struct.pack("<I", 8) + struct.pack("<q", number) for number in (5, 6)]
        >>> chunk = struct.pack("<4I", 2, 16, 28, 40) + b"".join(samples)
        >>> _ = (folder / "chunk-0-0.bin").write_bytes(chunk)
        >>> spec = json.dumps([1, {"type": None, "context": None, "children_spec": []}])
        >>> config = {"compression": None, "data_format": ["int"], "data_spec": spec, "encryption": None}
        >>> chunks = [{"filename": "chunk-0-0.bin", "chunk_bytes": 40, "chunk_size": 2, "dim": None}]
        >>> _ = (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
        >>> shards = Litdata(Files(str(folder)))
        >>> shards.get(shards.open(shards.chunks()[0], memoryview(chunk)), 1)
        6
    """

    suffixes = (".bin",)

    def __init__(self, files: Files, *, length: int | None = None) -> None:
        super().__init__(files)
        self.length = None if length is None else positive("length", length)

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether there is an ``index.json`` that lists chunks."""
        return index(files, "chunks") is not None

    def chunks(self) -> list[Chunk]:
        """Return the chunks that ``index.json`` lists."""
        contents = index(self.files, "chunks", last=True)
        where = self.files.url("index.json")
        if contents is None:
            raise WrongFile(f"{self.files.url()} has no index.json that lists chunks. Name the folder that has it.")
        try:
            config = contents["config"]
            extra = self._described(config, where)
            return [
                chunk
                for each in contents["chunks"]
                if (
                    chunk := self._chunk(each, extra, config.get("compression"), config.get("compression_level"))
                ).samples
            ]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, WrongValue):
                raise
            raise WrongFile(
                f"{where} is damaged: {type(error).__name__}: {error}. Write the data set again."
            ) from error

    def _described(self, config: dict[str, Any], where: str) -> list[Any]:
        """Return what decodes samples: the serializers, the structure, and the tokens of a sample or None."""
        loader = config.get("item_loader") or "PyTreeLoader"
        kinds = config["data_format"]
        if loader == "ParquetLoader" or kinds == "parquet":
            raise Unsupported(f"{where} is of Parquet files. Write format='parquet'.")
        refused = {
            "encryption": config.get("encryption"),
            "compression_level": config.get("compression_level") not in (None, "chunk", "batch", "sample")
            and config["compression_level"],
            "item_loader": loader not in ("PyTreeLoader", "TokensLoader") and loader,
        }
        for name, value in refused.items():
            if value:
                raise Unsupported(
                    f"{where} has {name} {value!r}, which is not supported. Write the data set without it."
                )
        for kind in kinds:
            _decoder(kind)
        if loader == "TokensLoader":
            if self.length is None:
                raise WrongValue(f"{where} is of tokens. Say how many a sample has: length=2048.")
            if len(kinds) != 1 or str(kinds[0]).partition(":")[0] not in _FLAT:
                raise Unsupported(f"{where} has tokens of the serializer {kinds}; supported are {', '.join(_FLAT)}.")
            return [kinds, None, self.length]
        if self.length is not None:
            raise WrongValue(f"{where} is not of tokens: leave out length={self.length}.")
        structure = _structure(safe_files.parsed(config["data_spec"])[1])
        if _leaves(structure) != len(kinds):
            raise ValueError("data_spec has another number of values than data_format")
        return [kinds, structure, None]

    def _chunk(self, listed: dict[str, Any], extra: list[Any], algorithm: str | None, level: str | None) -> Chunk:
        name = below(listed["filename"], self.files)
        size = whole(listed["chunk_bytes"], "chunk_bytes", self.files, 1)
        items = whole(listed["chunk_size"], "chunk_size", self.files)
        samples, described = items, extra
        if extra[2] is not None:
            samples, described = whole(listed["dim"], "dim", self.files) // extra[2], [*extra, items]
        if not algorithm:
            return Chunk((Part(name, size),), samples, extra=[None, described])
        compression.check(algorithm)
        if level in ("batch", "sample"):  # how much they are decompressed is in the chunk alone
            return Chunk((Part(name, size),), samples, stored=_GROWTH * size, extra=[level, described])
        return Chunk((Part(name, self._sizes()[name]),), samples, stored=size, extra=[algorithm, described])

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files, which litdata's index does not have for compressed ones."""
        if getattr(self, "_names", None) is None:
            self._names: dict[str, int] | None = self.files.names()
        return self._names or {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_names": None}

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        """Return a chunk decompressed."""
        algorithm = chunk.extra[0]
        if not algorithm:
            return fetched
        try:
            if algorithm in ("batch", "sample"):
                return _inflated(fetched)
            return compression.decompress(algorithm, fetched, chunk.stored)
        except (WrongFile, ValueError, struct.error) as error:
            raise damaged(self, chunk, error) from error

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the bytes, where samples begin, and how they are decoded."""
        kinds, structure, length, *items = chunk.extra[1]
        decoders = [_decoder(kind) for kind in kinds]
        if len(data) != chunk.kept and chunk.extra[0] not in ("batch", "sample"):
            raise damaged(self, chunk, f"it has {len(data):,} bytes, not {chunk.kept:,}")
        if data[-8:] == _FOOTER:
            return self._table(chunk, data), chunk
        if length is None:
            columns = Columns(decoders, [None] * len(decoders))
            return data, offsets(self, chunk, data).tolist(), columns, structure, chunk
        kind, number = kinds[0].split(":")
        row = length * np.dtype(_TENSORS[int(number)] if kind == "no_header_tensor" else _ARRAYS[int(number)]).itemsize
        start = 4 * (items[0] + 2)
        if start + row * chunk.samples > len(data):
            raise damaged(self, chunk, f"its {len(data):,} bytes are fewer than those of {chunk.samples} samples")
        return data, [start + row * k for k in range(chunk.samples + 1)], decoders[0], None, chunk

    def _table(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the columns of a chunk with a table of Arrow at its end, which litdata writes for dicts of plain values."""
        arrow = pyarrow("A chunk of litdata with a table of Arrow")
        length = int.from_bytes(data[-12:-8], "little")
        table = data[max(0, len(data) - 12 - length) : -12]
        try:
            opened = arrow.ipc.open_file if bytes(table[:6]) == b"ARROW1" else arrow.ipc.open_stream
            rows = opened(arrow.py_buffer(table)).read_all()
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise damaged(self, chunk, error) from error
        if rows.num_rows != chunk.samples:
            raise damaged(self, chunk, f"it has {rows.num_rows} rows, not {chunk.samples}")
        return columns_of(rows, arrays=False)

    def get(self, opened: Any, row: int) -> Any:
        """Return a sample in its structure."""
        if len(opened) == 2:
            return row_of(opened[0], row)
        data, starts, columns, structure, chunk = opened
        raw = data[starts[row] : starts[row + 1]]
        if not isinstance(columns, Columns):
            return columns(raw)
        try:
            values = iter(columns.decode(raw))
        except Unsupported as error:
            raise Unsupported(f"{self.files.url(chunk.parts[0].file)} has {error}.") from None
        except (ValueError, IndexError, TypeError, struct.error, OSError) as error:
            raise damaged(self, chunk, f"sample {row} cannot be decoded: {error}") from error
        return _built(structure, values)


def _inflated(data: bytes) -> bytes:
    """Return a chunk without compression of one whose samples are compressed, by themselves or in frames of several."""
    if data[:8] == _FRAMED:
        version, _, count, _, frames = struct.unpack_from("<2H3I", data, 8)
        starts = np.frombuffer(data, "<u4", count + 1, 24)
        begin = 24 + starts.nbytes
        table = list(struct.iter_unpack("<2IQ2I", data[begin : begin + 24 * frames]))
        values = [compression.decompress("zstd", data[at : at + size], full) for _, _, at, size, full in table]
        if version != 1 or sum(row[1] for row in table) != count:
            raise ValueError("its frames are of another version, or not complete")
        ends = starts + 4 * (count + 2)
        return b"".join([struct.pack("<I", count), ends.astype("<u4").tobytes(), *values])
    (count,) = struct.unpack_from("<I", data)
    starts = np.frombuffer(data, "<u4", count + 1, 4)
    values = [compression.decompress("zstd", data[a:b]) for a, b in itertools.pairwise(starts.tolist())]
    ends = np.cumsum([4 * (count + 2), *map(len, values)])
    return b"".join([struct.pack("<I", count), ends.astype("<u4").tobytes(), *values])


def _leaves(structure: Any) -> int:
    return 1 if structure is None else sum(map(_leaves, structure[2]))
