"""Arrays on disk, read by offset: packed tokens (``.bin``), ``.npy`` and ``.safetensors``. A sample is a row or a window."""

from __future__ import annotations

import ast
import math
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hocket.basics import safe_files
from hocket.errors import Unsupported, WrongFile, WrongValue
from hocket_streaming.errors import StreamError
from hocket_streaming.formats.common import damaged, positive
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: Bytes of a chunk, unless it is said.
UNIT = 1 << 21
#: What ``hocket data write`` says about tokens.
ABOUT = "tokens.json"
#: Most bytes of a header.
_HEADER = 1 << 27
#: Types of safetensors that numpy has, too.
_SAFETENSORS = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4", "F32": "<f4",
    "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


class Rows(Shards):
    """The base of formats whose files have one array: a chunk is a range of rows, and a sample an array.

    Args:
        files: the files of the data set.
        length: numbers of a sample, for arrays of one dimension; the rest of a file, shorter than that, is not read.
        chunk_bytes: bytes of a chunk, about.
    """

    def __init__(self, files: Files, *, length: int | None = None, chunk_bytes: int = UNIT) -> None:
        super().__init__(files)
        self.length = None if length is None else positive("length", length)
        self.chunk_bytes = positive("chunk_bytes", chunk_bytes)

    def array(self, name: str, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return dtype, shape and first byte of the array in a file of ``size`` bytes."""
        raise NotImplementedError

    def chunks_of(self, name: str, size: int) -> list[Chunk]:
        """Return ranges of rows of a file."""
        dtype, shape, start = self.array(name, size)
        where = self.files.url(name)
        if dtype.hasobject:
            raise Unsupported(f"{where} has Python objects, which are pickled and never read. Write it with numbers.")
        if start + math.prod(shape) * dtype.itemsize > size:
            raise WrongFile(f"{where} has {size:,} bytes, fewer than its header says: it is truncated. Fetch it again.")
        if len(shape) == 1:
            if self.length is None:
                raise WrongValue(
                    f"{where} has one dimension of {shape[0]:,} numbers. Say how many a sample has: length=2048."
                )
            shape = (shape[0] // self.length, self.length)
        elif self.length is not None:
            raise WrongValue(
                f"{where} has the shape {shape}, whose rows are the samples: leave out length={self.length}."
            )
        elif not shape:
            raise WrongFile(f"{where} has a single number, and no rows.")
        row = math.prod(shape[1:]) * dtype.itemsize
        if not row:
            raise WrongFile(f"{where} has the shape {shape}: its rows are empty.")
        step = max(1, self.chunk_bytes // row)
        extra = [dtype.str if dtype.names is None else dtype.descr, list(shape[1:])]
        return [
            Chunk(
                (Part(name, min(step, shape[0] - at) * row, start + at * row),), min(step, shape[0] - at), extra=extra
            )
            for at in range(0, shape[0], step)
        ]

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the rows as an array."""
        if len(data) != chunk.size:
            raise damaged(self, chunk, f"it has {len(data):,} bytes of {chunk.size:,}")
        kind, shape = chunk.extra
        try:
            dtype = np.dtype(kind if isinstance(kind, str) else [(str(name), *more) for name, *more in kind])
            return np.frombuffer(data, dtype).reshape(chunk.samples, *shape)
        except (ValueError, TypeError) as error:
            raise damaged(self, chunk, error) from error

    def get(self, opened: Any, row: int) -> Any:
        """Return a row, or window, as an array of numpy."""
        return opened[row].copy()


class Tokens(Rows):
    """Read packed tokens: files ``.bin`` of numbers without a header; a sample is a window of ``length`` numbers.

    Windows do not overlap. The end of a file that is shorter than a window is not read.

    Args:
        files: the files of the data set.
        dtype: the type of the numbers, such as ``"uint16"``; by default that of the ``tokens.json`` of ``hocket data write``.
        length: numbers of a sample; by default that of ``tokens.json``.
        skip: bytes at the beginning of every file that are not numbers.
        chunk_bytes: bytes of a chunk, about.

    Raises:
        hocket.errors.WrongValue: dtype or length is missing, or not one.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from hocket_streaming.formats.rows import Tokens
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.arange(20, dtype="uint16").tofile(folder / "tokens.bin")
        >>> shards = Tokens(Files(str(folder)), dtype="uint16", length=8)
        >>> (chunk,) = shards.chunks()
        >>> data = memoryview((folder / "tokens.bin").read_bytes())[:chunk.size]
        >>> shards.get(shards.open(chunk, data), 1)
        array([ 8,  9, 10, 11, 12, 13, 14, 15], dtype=uint16)
    """

    suffixes = (".bin",)

    def __init__(
        self,
        files: Files,
        *,
        dtype: str | None = None,
        length: int | None = None,
        skip: int = 0,
        chunk_bytes: int = UNIT,
    ) -> None:
        about = _about(files, needed=dtype is None or length is None)
        dtype = about.get("dtype") if dtype is None else dtype
        length = about.get("length") if length is None else length
        super().__init__(files, length=length, chunk_bytes=chunk_bytes)
        try:
            kind = np.dtype(dtype) if isinstance(dtype, str) else None
        except TypeError:
            kind = None
        if dtype is not None and (kind is None or kind.kind not in "iufb"):
            raise WrongValue(f"dtype={dtype!r} is not a type of numbers. Write for example dtype='uint16'.")
        if kind is None or length is None:
            raise WrongValue(
                f"Files of tokens do not say their type, nor how many are a sample: dtype={dtype!r}, length={length!r}. "
                "Write for example dtype='uint16', length=2048."
            )
        if "dtype" in about and (skip or about["dtype"] not in (dtype, kind.name)):
            given, said = (f"skip={skip!r}", 0) if skip else (f"dtype={dtype!r}", about.get("dtype"))
            raise WrongValue(f"{given} contradicts {files.url(ABOUT)}, by which it is {said!r}. Leave it out.")
        if not isinstance(skip, int) or skip < 0:
            raise WrongValue(f"skip={skip!r} is not a number of bytes. Write skip=0 for files without a header.")
        self.dtype, self.skip = dtype, skip

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether there are files ``.bin``, and no ``index.json``, which other formats have."""
        return super().serves(files) and "index.json" not in files.listed()

    def array(self, name: str, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return the array that is the file."""
        dtype = np.dtype(self.dtype)
        if self.skip > size:
            raise WrongValue(f"skip={self.skip} is more than the {size:,} bytes of {self.files.url(name)}. Write less.")
        return dtype, ((size - self.skip) // dtype.itemsize,), self.skip


def _about(files: Files, needed: bool) -> dict[str, Any]:
    """Return what `ABOUT` says; nothing where a store refuses to say whether there is one, unless it is needed."""
    try:
        about = safe_files.parsed(files.read(ABOUT)) if files.has(ABOUT) else {}
    except StreamError:
        if needed:
            raise
        about = {}
    return about if isinstance(about, dict) else {}


class Npy(Rows):
    """Read ``.npy`` files: a sample is a row of an array, or a window of ``length`` numbers of one with one dimension.

    Args:
        files: the files of the data set.
        length: numbers of a sample, for arrays of one dimension; the rest of a file, shorter than that, is not read.
        chunk_bytes: bytes of a chunk, about.

    Raises:
        hocket.errors.Unsupported: an array of Python objects, which are pickled, or in the order of Fortran.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from hocket_streaming.formats.rows import Npy
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.save(folder / "rows.npy", np.arange(12.0).reshape(4, 3))
        >>> shards = Npy(Files(str(folder)))
        >>> (chunk,) = shards.chunks()
        >>> data = memoryview((folder / "rows.npy").read_bytes())[chunk.parts[0].start:]
        >>> shards.get(shards.open(chunk, data), 1)
        array([3., 4., 5.])
    """

    suffixes = (".npy",)

    def array(self, name: str, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return what the header of the file says."""
        head = self.files.read(name, 0, min(size, 1 << 12))
        try:
            if head[:6] != b"\x93NUMPY":
                raise ValueError("it does not begin as one")
            wide = head[6] > 1
            (length,) = struct.unpack_from("<I" if wide else "<H", head, 8)
            start = (12 if wide else 10) + length
            if start > min(size, _HEADER):
                raise ValueError("its header is truncated")
            if start > len(head):
                head = self.files.read(name, 0, start)
            about = ast.literal_eval(head[start - length : start].decode("latin1" if head[6] < 3 else "utf-8"))
            dtype, shape = np.dtype(about["descr"]), tuple(int(each) for each in about["shape"])
        except (ValueError, LookupError, TypeError, SyntaxError, struct.error, RecursionError, MemoryError) as error:
            raise WrongFile(
                f"{self.files.url(name)} is not a .npy file: {error}. Write it again with numpy.save."
            ) from error
        if about.get("fortran_order") and len(shape) > 1:
            raise Unsupported(
                f"{self.files.url(name)} is stored by columns (fortran_order), so a row is not in one place. Write it with "
                "numpy.save(file, numpy.ascontiguousarray(array))."
            )
        return dtype, shape, start


class Safetensors(Rows):
    """Read a tensor of every ``.safetensors`` file: a sample is a row, or a window of ``length`` numbers of one dimension.

    Args:
        files: the files of the data set.
        tensor: the name of the tensor; it may be left out where the files have one.
        length: numbers of a sample, for tensors of one dimension; the rest of a file, shorter than that, is not read.
        chunk_bytes: bytes of a chunk, about.

    Raises:
        hocket.errors.Unsupported: the tensor has a type that numpy has not, such as BF16.

    Example:
        >>> import json, pathlib, struct, tempfile
        >>> import numpy as np
        >>> from hocket_streaming.formats.rows import Safetensors
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> header = json.dumps({"tokens": {"dtype": "U16", "shape": [4, 2], "data_offsets": [0, 16]}}).encode()
        >>> rows = np.arange(8, dtype="uint16")
        >>> _ = (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + rows.tobytes())
        >>> shards = Safetensors(Files(str(folder)))
        >>> (chunk,) = shards.chunks()
        >>> shards.get(shards.open(chunk, memoryview(rows.tobytes())), 3)
        array([6, 7], dtype=uint16)
    """

    suffixes: ClassVar[tuple[str, ...]] = (".safetensors",)

    def __init__(
        self, files: Files, *, tensor: str | None = None, length: int | None = None, chunk_bytes: int = UNIT
    ) -> None:
        super().__init__(files, length=length, chunk_bytes=chunk_bytes)
        self.tensor = tensor

    def array(self, name: str, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return what the header of the file says of the tensor."""
        head, where = self.files.read(name, 0, min(size, 1 << 16)), self.files.url(name)
        try:
            (length,) = struct.unpack_from("<Q", head)
            if length + 8 > min(size, _HEADER):
                raise ValueError("its header is truncated")
            if length + 8 > len(head):
                head = self.files.read(name, 0, length + 8)
            tensors = safe_files.parsed(head[8 : length + 8])
            tensors.pop("__metadata__", None)
            names = [self.tensor] if self.tensor is not None else list(tensors)
            if len(names) != 1 or names[0] not in tensors:
                asked = f"no tensor '{self.tensor}'" if self.tensor is not None else f"{len(names)} tensors"
                there = ", ".join(sorted(tensors)[:10])
                raise WrongValue(
                    f"{where} has {asked}. Write tensor= with one of {there or 'its names (it has none)'}."
                )
            if length + 8 + max(one["data_offsets"][1] for one in tensors.values()) > size:
                raise ValueError("it is truncated")
            about = tensors[names[0]]
            kind, shape, (begin, end) = about["dtype"], tuple(map(int, about["shape"])), map(int, about["data_offsets"])
        except WrongValue:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise WrongFile(f"{where} is not a .safetensors file: {error}. Write it again.") from error
        if kind not in _SAFETENSORS:
            raise Unsupported(
                f"{where} has numbers of the type {kind}, which numpy has not. Write them as F32, or view them as U16."
            )
        dtype = np.dtype(_SAFETENSORS[kind])
        if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise WrongFile(f"{where} is damaged: '{names[0]}' has the shape {shape} and {end - begin:,} bytes.")
        return dtype, shape, length + 8 + begin
