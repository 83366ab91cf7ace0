"""Columns of MDS: which encoding a value gets, and the bytes of values and samples.

The facts of the format are those of mosaicml-streaming, ``streaming/base/format/mds``: columns are sorted by name; a sample is
the uint32 sizes of its columns without a fixed size, then the bytes of all columns. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hocket.errors import WrongValue

#: Numbers of a fixed size, as the format names them.
SCALARS = tuple(f"{kind}{8 << power}" for kind in ("int", "uint", "float") for power in range(kind == "float", 4))
#: The byte that stands for the dtype of an array.
_DTYPES = {
    "uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34, "uint64": 64,
    "int64": 65, "float64": 66,
}  # fmt: skip
_TEXTS: dict[str, type] = {"str_int": int, "str_float": float}
#: Encodings that hold bytes as they are: a JPEG or PNG is the content of such a file.
_MAGIC = {"bytes": b"", "jpeg": b"\xff\xd8", "png": b"\x89PNG"}
ENCODINGS = ("bytes", "str", "int", "ndarray", *SCALARS, *_TEXTS, "jpeg", "png", "json")

Encode = Callable[[Any], bytes]


def encoder(encoding: str) -> tuple[Encode, int | None]:
    """Return the function that encodes a value of a column, and the bytes that it returns; None where they differ.

    Raises:
        WrongValue: there is no such encoding, or it executes code when it is read (``pkl``).
    """
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        return _array(encoding, options)
    if kind in SCALARS:
        return _scalar(np.dtype(kind)), np.dtype(kind).itemsize
    simple: dict[str, tuple[Encode, int | None]] = {
        "str": (_text, None), "int": (_int, 8), "json": (_json, None),
        **{name: (_printed(kind), None) for name, kind in _TEXTS.items()},
        **{name: (_bytes(magic), None) for name, magic in _MAGIC.items()},
    }  # fmt: skip
    if kind not in simple:
        why = "is never written, because reading it executes code" if kind == "pkl" else "is not an encoding of MDS"
        raise WrongValue(f"{encoding!r} {why}. Write one of: {', '.join(ENCODINGS)}.")
    return simple[kind]


def _text(value: Any) -> bytes:
    return str(_expected(value, str)).encode()


def _int(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{type(value).__name__} instead of int")
    return struct.pack("<q", value)


def _json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray | np.generic) else value).encode()


def _bytes(magic: bytes) -> Encode:
    def encode(value: Any) -> bytes:
        content = bytes(_expected(value, bytes | bytearray | memoryview))
        if not content.startswith(magic):
            raise TypeError(f"content that begins with {content[:4]!r} instead of {magic!r}")
        return content

    return encode


def _printed(kind: type) -> Encode:
    return lambda value: str(_expected(value, kind)).encode()


def _expected(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {getattr(kind, '__name__', kind)}")
    return value


def _scalar(dtype: np.dtype[Any]) -> Encode:
    def encode(value: Any) -> bytes:
        encoded = np.asarray(value)
        if encoded.ndim or encoded.dtype.kind not in "iufb":
            raise TypeError(f"{type(value).__name__} instead of a number")
        if dtype.kind in "iu" and (encoded.dtype.kind == "f" or encoded.astype(dtype) != encoded):
            raise TypeError(f"{value!r}, which is not a number of {dtype.name}")
        return encoded.astype(dtype).tobytes()

    return encode


def _array(encoding: str, options: str) -> tuple[Encode, int | None]:
    dtype, _, axes = options.partition(":")
    if dtype not in _DTYPES and (dtype or axes):
        raise WrongValue(f"{encoding!r} has a dtype that MDS does not have. Write one of: {', '.join(_DTYPES)}.")
    try:
        shape = tuple(map(int, axes.split(","))) if axes else None
    except ValueError:
        raise WrongValue(
            f"{encoding!r} has a shape that is not numbers. Write it as ndarray:float32:3,224,224."
        ) from None

    def encode(value: Any) -> bytes:
        array = np.asarray(value)
        if array.dtype.name not in _DTYPES or (dtype and array.dtype.name != dtype):
            raise TypeError(f"an array of {array.dtype.name} instead of {dtype or ', '.join(_DTYPES)}")
        if not array.size or not array.ndim:
            raise TypeError(f"an array of shape {array.shape}, which MDS does not have")
        head = b"" if dtype else bytes([_DTYPES[array.dtype.name]])
        if shape is None:
            width = next(width for width in range(4) if max(array.shape) < 1 << (8 << width))
            head += bytes([array.ndim << 2 | width]) + np.array(array.shape, f"<u{1 << width}").tobytes()
        elif array.shape != shape:
            raise TypeError(f"an array of shape {array.shape} instead of {shape}")
        return head + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize if shape else None
    return encode, size


class Columns:
    """The columns of a data set, and the bytes of its samples.

    Args:
        encodings: encoding by name of column, such as ``{"image": "bytes", "label": "int"}``.

    Example:
        >>> from hocket_streaming.writing.columns import Columns
        >>> Columns({"label": "int", "text": "str"}).encode({"text": "ab", "label": 3})
        b'\\x02\\x00\\x00\\x00\\x03\\x00\\x00\\x00\\x00\\x00\\x00\\x00ab'
    """

    def __init__(self, encodings: Mapping[str, str]) -> None:
        if not encodings:
            raise WrongValue("A data set needs a column. Write columns={'text': 'str'}.")
        self.encodings = dict(sorted(encodings.items()))
        made = {name: encoder(encoding) for name, encoding in self.encodings.items()}
        self._encoders = [(name, *each) for name, each in made.items()]
        #: Bytes of each column, by name; None where they differ.
        self.sizes = {name: size for name, (_, size) in made.items()}

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Return the bytes of a sample.

        Raises:
            WrongValue: it has other columns, or a value does not fit its column.
        """
        if sample.keys() != self.sizes.keys():
            raise WrongValue(
                f"A sample has the columns {', '.join(map(repr, sorted(sample)))}, and the data set has "
                f"{', '.join(map(repr, self.sizes))}. All samples need the same columns."
            )
        values, sizes = [], []
        for name, encode, size in self._encoders:
            try:
                value = encode(sample[name])
            except (TypeError, ValueError, OverflowError, struct.error) as error:
                raise WrongValue(
                    f"Column {name!r} is {self.encodings[name]!r}, and a sample has {error}. State an encoding for all "
                    f"samples, such as --columns {name}=json, or columns={{{name!r}: 'json'}}."
                ) from error
            values.append(value)
            if size is None:
                sizes.append(len(value))
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values)

    def decode(self, encoded: bytes) -> dict[str, Any]:
        """Return the sample of `encode`; images stay as bytes."""
        from hocket_streaming.formats.encodings import decoder

        count = sum(size is None for size in self.sizes.values())
        sizes = iter(struct.unpack_from(f"<{count}I", encoded))
        at, sample = 4 * count, {}
        for name, size in self.sizes.items():
            taken = next(sizes) if size is None else size
            kind = self.encodings[name]
            sample[name] = decoder("bytes" if kind in _MAGIC else kind, name)(encoded[at : at + taken])
            at += taken
        return sample


def infer(samples: Iterable[Mapping[str, Any]], stated: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the encodings for samples: what is stated, and for the other columns one that holds the values of all of them."""
    encodings: dict[str, str] = {}
    for sample in samples:
        for name, value in sample.items():
            encodings[name] = _both(encodings.get(name), _encoding(value))
    if unknown := sorted((stated or {}).keys() - encodings.keys()):
        raise WrongValue(
            f"There is no column {unknown[0]!r}; the samples have {', '.join(map(repr, sorted(encodings)))}. "
            "Correct its name, or leave it out."
        )
    return {**encodings, **(stated or {})}


def _encoding(value: Any) -> str:
    if isinstance(value, np.generic):
        return value.dtype.name if value.dtype.name in SCALARS else "json"
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES and value.size and value.ndim:
        return f"ndarray:{value.dtype.name}"
    kinds = {str: "str", int: "int", float: "float64"}
    return kinds.get(type(value), "json")


def _both(a: str | None, b: str) -> str:
    if a is None or a == b:
        return b
    if {a, b} == {"int", "float64"}:
        return "float64"
    return "ndarray" if a.startswith("ndarray") and b.startswith("ndarray") else "json"


def plain(sample: Any) -> dict[str, Any]:
    """Return a sample as a dict of plain values, tensors as arrays; a value that is not a mapping by the name of its kind."""
    if isinstance(sample, tuple):
        sample = {str(number): value for number, value in enumerate(sample)}
    if not isinstance(sample, Mapping):
        kinds: dict[type, str] = {str: "text", bytes: "content"}
        sample = {kinds.get(type(sample), "values"): sample}
    return {str(name): np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, np.generic) else value
            for name, value in sample.items()}  # fmt: skip
