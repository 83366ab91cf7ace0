"""References to tensors, as a checkpoint's tree has them, checked against what the shards have. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.checkpoints import header, tree
from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.header import Entry

_KEYS = {"file", "name", "dtype", "shape", "stride", "offset"}
#: Bytes per element of every dtype that is stored, by torch's name. The last ones are stored as bytes.
SIZES = dict(header.DTYPES.values()) | {
    "complex32": 4,
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}


def references(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted path and reference of every tensor in a tree's JSON. Raises CheckpointError for malformed ones."""
    try:
        for path, leaf in tree.leaves(node):
            if tree.special(leaf) == "$tensor":
                yield path, _checked(path, leaf["$tensor"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}.") from None


def _checked(path: str, reference: Any) -> dict[str, Any]:
    if not isinstance(reference, dict) or not {"file", "name", "dtype", "shape"} <= set(reference) <= _KEYS:
        raise ValueError(f"the tensor at '{path}' is described wrongly")
    if not all(isinstance(reference[key], str) for key in ("file", "name", "dtype")):
        raise ValueError(f"the tensor at '{path}' has a file, a name or a dtype that is no text")
    if reference["dtype"] not in SIZES:
        raise ValueError(f"the tensor at '{path}' has the unknown dtype {reference['dtype']!r}")
    numbers = [reference["shape"], reference.get("stride", reference["shape"]), [reference.get("offset", 0)]]
    if not all(isinstance(each, list) and all(type(n) is int and 0 <= n < 2**63 for n in each) for each in numbers):
        raise ValueError(f"the tensor at '{path}' has a shape, stride or offset that is no list of numbers")
    if len(numbers[0]) != len(numbers[1]) or ("offset" in reference and "stride" not in reference):
        raise ValueError(f"the tensor at '{path}' has a stride that does not fit its shape")
    return reference


def check(path: str, reference: Mapping[str, Any], entries: Mapping[str, Mapping[str, Entry]]) -> None:
    """Raise CheckpointError unless this tensor is within what its file stores."""
    file, name, dtype, shape = (reference[key] for key in ("file", "name", "dtype", "shape"))
    entry = entries.get(file, {}).get(name)
    if entry is None:
        raise CheckpointError(f"{file}: it has no tensor '{name}', which is wanted at '{path}'.")
    size, stride, numel = SIZES[dtype], reference.get("stride"), math.prod(shape)
    stored = header.DTYPES[entry.dtype][0]
    if "offset" in reference:
        last = reference["offset"] + sum((n - 1) * step for n, step in zip(shape, stride or (), strict=True))
        fits = stored in (dtype, "uint8") and numel > 0 and (last + 1) * size <= entry.nbytes
    else:
        fits = (stored, list(entry.shape)) == (dtype, shape) or (stored == "uint8" and numel * size == entry.nbytes)
        fits = fits and (stride is None or is_dense(shape, stride))
    if not fits:
        raise CheckpointError(f"{file}: '{name}' is not what the tensor at '{path}' needs ({dtype}, shape {shape}).")


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of a permuted contiguous tensor."""
    expected = 1
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True
