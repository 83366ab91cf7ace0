"""Decode the values of MDS columns, by the names of their encodings in ``index.json``. Nothing is unpickled."""

from __future__ import annotations

import io
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from hocket.errors import Unsupported, WrongFile
from hocket.help import installing
from hocket_streaming.formats.common import missing

#: Called with a view of the value, which it must not keep.
Decoder = Callable[[Any], Any]
_SCALARS = [
    f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64) if f"{kind}{bits}" != "float8"
]
#: The types of values, and of numbers in a shape, by the byte that an array without a fixed one starts with.
_ARRAY_TYPES = {int(np.dtype(name).itemsize * 8 + "uif".index(name[0])): name for name in _SCALARS}
_SHAPE_TYPES = ("<u1", "<u2", "<u4", "<u8")


def of_bytes(decode: Callable[[bytes], Any]) -> Decoder:
    """Return a decoder of views for one of bytes. Arrays, the large values, are decoded without this copy."""
    return lambda data: decode(bytes(data))


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise missing("A column of images needs Pillow", installing.library("pillow")) from error
    return PIL.Image


def image_file(data: bytes) -> Any:
    """Return a PIL image of the bytes of a file, such as JPEG or PNG."""
    return _pillow().open(io.BytesIO(data))


def raw_image(data: bytes) -> Any:
    """Return a PIL image of its width, height, length of its mode (uint32 each), mode and pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    return _pillow().frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _several(decode: Decoder, start: int) -> Decoder:
    """Return the decoder of a list: a number at ``start``, as many sizes (uint32 each) and the values."""

    def decode_all(data: bytes) -> list[Any]:
        (count,) = struct.unpack_from("<I", data, start)
        sizes = struct.unpack_from(f"<{count}I", data, start + 4)
        ends = np.cumsum([start + 4 + 4 * count, *sizes]).tolist()
        if ends[-1] != len(data):
            raise WrongFile(f"a list of {count} values has {len(data)} bytes; their sizes say {ends[-1]}")
        return [decode(data[begin:end]) for begin, end in itertools.pairwise(ends)]

    return decode_all


def array(dtype: str | None, shape: tuple[int, ...] | None) -> Decoder:
    """Return the decoder of an ``ndarray`` column; None for what each array says itself."""

    def decode(data: bytes) -> Any:
        at, kind, dimensions = 0, dtype, shape
        if kind is None:
            kind, at = _ARRAY_TYPES[data[0]], 1
        if dimensions is None:
            numbers = np.frombuffer(data, _SHAPE_TYPES[data[at] & 3], data[at] >> 2, at + 1)
            at += 1 + numbers.nbytes
            dimensions = tuple(numbers.tolist())
        return np.frombuffer(data, kind, offset=at).reshape(dimensions).copy()

    return decode


def _scalar(dtype: str) -> Decoder:
    kind = np.dtype(dtype).newbyteorder("<")
    return lambda data: np.frombuffer(data, kind)[0]


class Columns:
    """Decode a sample: the sizes of its values of varying size (uint32 each), and then all values.

    Args:
        decoders: of the values.
        sizes: of the values, in bytes; None for a varying one.
    """

    def __init__(self, decoders: Sequence[Decoder], sizes: Sequence[int | None]) -> None:
        self._columns = list(zip(decoders, sizes, strict=True))
        self._header = struct.Struct(f"<{sum(not size for size in sizes)}I")

    def decode(self, raw: memoryview) -> list[Any]:
        """Return the values of a sample. Raises ValueError or struct.error where it has another number of bytes."""
        varying, at, values = iter(self._header.unpack_from(raw)), self._header.size, []
        for decode, size in self._columns:
            end = at + (size or next(varying))
            values.append(decode(raw[at:end]))
            at = end
        if at != len(raw):
            raise ValueError(f"it has {len(raw)} bytes; its columns have {at}")
        return values


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "pil": raw_image,
    "jpeg": image_file,
    "png": image_file,
    "jpeg_array": _several(image_file, 0),
    "jpegarray": _several(image_file, 0),
    "list[pil]": _several(raw_image, 4),
    "list[jpeg]": _several(image_file, 4),
    "list[png]": _several(image_file, 4),
    **{name: _scalar(name) for name in _SCALARS},
}


def decoder(encoding: str, column: str) -> Decoder:
    """Return the function that decodes the values of a column.

    Args:
        encoding: such as ``"str"`` or ``"ndarray:float32:3,4"``.
        column: its name, for messages.

    Raises:
        hocket.errors.Unsupported: an encoding that is unknown, or a pickle, which can run code when it is read.
    """
    name, _, rest = encoding.partition(":")
    if name == "pkl":
        raise Unsupported(
            f"The column '{column}' is pickled (encoding 'pkl'). Pickles of a data set can run code and are never read: write "
            "the data set again with another encoding, such as 'json', 'ndarray' or 'bytes'."
        )
    if name == "ndarray":
        dtype, _, shape = rest.partition(":")
        if not dtype or dtype in _SCALARS:
            return array(dtype or None, tuple(map(int, shape.split(","))) if shape else None)
    elif encoding in _DECODERS:
        return of_bytes(_DECODERS[encoding])
    known = ", ".join(sorted((*_DECODERS, "ndarray")))
    raise Unsupported(
        f"The column '{column}' has the encoding {encoding!r}. Supported are {known}: write it with one of them."
    )
