"""References to tensors in a checkpoint's tree, checked against the shards. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hocket.errors import CheckpointError, WrongValue
from hocket_checkpoints.storage import header, tree_json
from hocket_checkpoints.storage.header import Entry

_KEYS = {"file", "name", "dtype", "shape", "stride", "offset"}
_SHARDED, _PIECE = {"dtype", "shape", "pieces"}, {"file", "name", "begin", "shape"}
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
    """Yield dotted path and reference of every tensor in a tree's JSON. Raises CheckpointError for malformed ones."""
    try:
        for path, leaf in tree_json.leaves(node):
            if tree_json.special(leaf) == "$tensor":
                yield path, _checked(path, leaf["$tensor"])
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}.") from None


def _checked(path: str, reference: Any) -> dict[str, Any]:
    keys = set(reference) if isinstance(reference, dict) else set()
    if keys != _SHARDED and not {"file", "name", "dtype", "shape"} <= keys <= _KEYS:
        raise WrongValue(f"the tensor at '{path}' is described wrongly")
    if not isinstance(reference["dtype"], str) or reference["dtype"] not in SIZES:
        raise WrongValue(f"the tensor at '{path}' has the unknown dtype {reference['dtype']!r}")
    numbers = [reference["shape"], reference.get("stride", reference["shape"]), [reference.get("offset", 0)]]
    if keys == _SHARDED:
        parts = reference["pieces"]
        if not isinstance(parts, list) or not all(isinstance(each, dict) and set(each) == _PIECE for each in parts):
            raise WrongValue(f"the pieces of the tensor at '{path}' are described wrongly")
        numbers += [each[key] for each in parts for key in ("begin", "shape")]
    if not all(isinstance(each[key], str) for each in reference.get("pieces", [reference]) for key in ("file", "name")):
        raise WrongValue(f"the tensor at '{path}' has a file or a name that is not text")
    if not all(isinstance(each, list) and all(type(n) is int and 0 <= n < 2**63 for n in each) for each in numbers):
        raise WrongValue(f"the tensor at '{path}' has a shape, stride or offset that is not a list of numbers")
    if len(numbers[0]) != len(numbers[1]) or ("offset" in reference and "stride" not in reference):
        raise WrongValue(f"the tensor at '{path}' has a stride that does not fit its shape")
    for each in [reference, *reference.get("pieces", ())]:
        header.numel(each["shape"])
    if keys == _SHARDED and not whole(reference):
        raise WrongValue(f"the pieces of the tensor at '{path}' leave gaps or overlap")
    checked: dict[str, Any] = reference
    return checked


def pieces(reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stored pieces of a tensor: ``file``, ``name``, ``shape``, and ``begin``, the index of its first element."""
    if "pieces" in reference:
        return list(reference["pieces"])
    return [{**{key: reference[key] for key in ("file", "name", "shape")}, "begin": [0] * len(reference["shape"])}]


def overlap(piece: Mapping[str, Any], begin: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Return the overlap of a piece and the box at ``begin`` of ``shape``: first index and shape. None if there is none."""
    first = [max(a, b) for a, b in zip(piece["begin"], begin, strict=True)]
    ends = zip(piece["begin"], piece["shape"], begin, shape, strict=True)
    sizes = [min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, first, strict=True)]
    return (first, sizes) if all(size > 0 for size in sizes) else None


def whole(reference: Mapping[str, Any]) -> bool:
    """Whether the pieces of a tensor cover each element exactly once."""
    shape = reference["shape"]
    if not all(len(each["begin"]) == len(each["shape"]) == len(shape) for each in reference["pieces"]):
        return False
    boxes = [list(zip(each["begin"], each["shape"], strict=True)) for each in reference["pieces"]]
    return _fill(boxes, [(0, n) for n in shape]) if header.numel(shape) else not boxes


def _fill(boxes: list[list[tuple[int, int]]], box: list[tuple[int, int]], cuts_left: int = 32) -> bool:
    """Whether boxes fill a box: split it along a dimension where no piece crosses the split, until each part has one piece.

    Shards on meshes of few dimensions need few splits. The limit bounds the work for other pieces.
    """
    if len(boxes) == 1:
        return boxes[0] == box
    if not cuts_left:
        return False
    for dim, (start, size) in enumerate(box):
        slabs: list[list[list[tuple[int, int]]]] = []
        cuts = [start]
        for each in sorted(boxes, key=lambda each: each[dim]):
            begin, n = each[dim]
            if begin >= cuts[-1]:
                slabs.append([])
                cuts.append(begin)
            slabs[-1].append(each)
            cuts[-1] = max(cuts[-1], begin + n)
        if len(slabs) > 1 and cuts[-1] == start + size:
            parts = zip(slabs, pairwise(cuts), strict=True)
            return all(_fill(slab, [*box[:dim], (a, b - a), *box[dim + 1 :]], cuts_left - 1) for slab, (a, b) in parts)
    return False


def check(path: str, reference: Mapping[str, Any], entries: Mapping[str, Mapping[str, Entry]]) -> None:
    """Raise CheckpointError unless the files in ``entries`` store what this tensor needs."""
    for piece in reference.get("pieces", ()):
        if piece["file"] in entries:
            check(path, {**piece, "dtype": reference["dtype"]}, entries)
    if "pieces" in reference:
        return
    file, name, dtype, shape = (reference[key] for key in ("file", "name", "dtype", "shape"))
    entry = entries.get(file, {}).get(name)
    if entry is None:
        raise CheckpointError(f"{file}: it has no tensor '{name}', which is wanted at '{path}'.")
    size, stride, numel = SIZES[dtype], reference.get("stride"), header.numel(shape)
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
