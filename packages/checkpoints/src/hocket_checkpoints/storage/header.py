"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from hocket.errors import CheckpointError, WrongValue

#: safetensors' name of a dtype -> torch's name and bytes per element. Other dtypes are stored as bytes.
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
#: torch's name -> safetensors' name.
NAMES = {name: key for key, (name, _) in DTYPES.items()}
#: The most bytes that a header may have, as in the safetensors library.
LIMIT = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: safetensors' dtype, shape, and where its bytes are, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape. Raises ValueError, quickly for any shape, if no tensor has as many."""
    if 0 in shape:
        return 0
    product = 1
    for n in shape:
        product *= n
        if product >= 2**63:
            raise WrongValue("a shape has more elements than any tensor")
    return product


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """Return the header for tensors given as name, torch's dtype and shape, and their entries in the order of their bytes.

    Wide elements come first, so that each tensor begins at a multiple of its element's size.
    """
    entries, end = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda each: -DTYPES[NAMES[each[1]]][1]):
        start, end = end, end + DTYPES[NAMES[dtype]][1] * math.prod(shape)
        entries.append(Entry(name, NAMES[dtype], shape, start, end))
    described = {e.name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.end]} for e in entries}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LIMIT:
        raise CheckpointError(f"The names of {len(entries)} tensors take {len(text)} bytes; {LIMIT} fit into one file.")
    return len(text).to_bytes(8, "little") + text, entries


def read(stream: BinaryIO, size: int, file: str) -> tuple[bytes, list[Entry]]:
    """Return the raw header of a file of ``size`` bytes and its entries in the order of their bytes, all checked.

    Raises CheckpointError, naming ``file``, unless the tensors fill the rest of the file without gap or overlap.
    """
    raw = stream.read(8)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or not 2 <= length <= min(LIMIT, size - 8):
        raise CheckpointError(
            f"{file}: it is {'not a safetensors file' if size else 'empty'}{pickled(raw)}. Copy or write it again."
        )
    text = stream.read(length)
    try:
        described = json.loads(text)
        if not isinstance(described, dict):
            raise WrongValue("its header is not a JSON object")
        described.pop("__metadata__", None)
        entries = sorted((_entry(name, about) for name, about in described.items()), key=lambda e: (e.start, e.end))
        end = 0
        for entry in entries:
            if entry.start != end:
                raise WrongValue(f"'{entry.name}' does not begin where the tensor before it ends")
            end = entry.end
        if 8 + length + end != size:
            raise WrongValue(f"its header describes {8 + length + end} bytes, and it has {size}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: it is not a valid safetensors file: {error}. Copy or write it again.") from None
    return raw + text, entries


def _entry(name: str, about: dict[str, Any]) -> Entry:
    dtype, shape, (start, end) = about["dtype"], about["shape"], about["data_offsets"]
    if dtype not in DTYPES:
        raise WrongValue(f"'{name}' has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, start, end)):
        raise WrongValue(f"'{name}' has a shape or a position that is not a number")
    if end - start != DTYPES[dtype][1] * numel(shape):
        raise WrongValue(f"'{name}' has {end - start} bytes, which is not what its dtype and shape need")
    return Entry(name, dtype, tuple(shape), start, end)


def pickled(start: bytes) -> str:
    """Return a clause for messages if the bytes begin a pickle or an archive of ``torch.save``, else an empty string."""
    return " but a pickle, which is never loaded" if start[:1] == b"\x80" or start[:2] == b"PK" else ""
