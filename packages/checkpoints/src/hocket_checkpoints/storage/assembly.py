"""Assemble tensors from files: full tensors, views of shared memory, and shards from the stored pieces that overlap them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.basics.dtensors import from_shard, local, place
from hocket.basics.plain_data import DTYPES
from hocket_checkpoints.storage import references as refs, shards
from hocket_checkpoints.storage.header import Entry

_Slices = tuple[slice, ...]


@dataclass(slots=True)
class _Part:
    """The overlap of a stored piece and a tensor."""

    tensor: Tensor
    there: _Slices
    piece: _Slices
    shape: list[int]

    def view(self) -> Tensor | None:
        """Return the piece's view of the tensor, if the file can be read directly into it."""
        view = self.tensor[self.there]
        return view if list(view.shape) == self.shape and view.is_contiguous() else None


class Assembly:
    """Make tensors from references. Equal references give the same tensor, and shared memory stays shared.

    Args:
        wanted: references, each with a DTensor whose sharding the result gets on this rank, or None for the full tensor.
        device: the device of the tensors.
    """

    def __init__(self, wanted: Iterable[tuple[dict[str, Any], Tensor | None]], device: torch.device | str) -> None:
        self._device = device
        self._like: dict[str, Tensor | None] = {}
        self._made: dict[str, Tensor] = {}
        self._kept: dict[tuple[str, str], Tensor | None] = {}
        self._parts: dict[tuple[str, str], list[_Part]] = {}
        for reference, like in wanted:
            key = _key(reference)
            if key in self._like:
                continue
            self._like[key] = like
            if "pieces" in reference or like is not None:
                self._made[key] = self._begin(reference, like)
            else:
                self._kept[reference["file"], reference["name"]] = None

    def _begin(self, reference: dict[str, Any], like: Tensor | None) -> Tensor:
        begin, shape = box(reference, like)
        tensor = torch.empty(tuple(shape), dtype=DTYPES[reference["dtype"]])
        for piece in refs.pieces(reference):
            if (met := refs.overlap(piece, begin, shape)) is not None:
                there, inside = (
                    tuple(
                        slice(at - origin, at - origin + n) for at, origin, n in zip(met[0], start, met[1], strict=True)
                    )
                    for start in (begin, piece["begin"])
                )
                part = _Part(tensor, there, inside, piece["shape"])
                self._parts.setdefault((piece["file"], piece["name"]), []).append(part)
        return tensor

    def target(self, file: str, entry: Entry) -> Tensor | None:
        """Return the memory to read a file's entry into; see `shards.read`."""
        parts = self._parts.get((file, entry.name), [])
        if (file, entry.name) in self._kept or len(parts) > 1:
            return shards.new(entry)
        if not parts:
            return None
        view = parts[0].view()
        return shards.new(entry) if view is None else view

    def filled(self, file: str, entry: Entry, tensor: Tensor) -> None:
        """Copy an entry that was read to the tensors that need it."""
        for part in self._parts.get((file, entry.name), ()):
            if tensor.data_ptr() != part.tensor[part.there].data_ptr():
                stored = tensor if tensor.dtype == part.tensor.dtype else tensor.view(part.tensor.dtype)
                part.tensor[part.there].copy_(stored.view(part.shape)[part.piece])
        if (file, entry.name) in self._kept:
            self._kept[file, entry.name] = tensor.to(self._device)

    def __call__(self, reference: dict[str, Any]) -> Tensor:
        """Return the tensor, once its files were read. Raises ValueError if the reference does not fit the stored data."""
        key = _key(reference)
        if (like := self._like.pop(key, None)) is not None:
            self._made[key] = from_shard(self._made[key].to(self._device), like)
        elif "pieces" in reference:
            self._made[key] = self._made[key].to(self._device)
        elif key not in self._made:
            base = self._kept[reference["file"], reference["name"]]
            assert base is not None, "its file was read"
            self._made[key] = _restore(base, reference)
        return self._made[key]


def box(reference: dict[str, Any], like: Tensor | None) -> tuple[list[int], list[int]]:
    """Return the part of a tensor that is needed: index of the first element, and shape."""
    if like is None:
        return [0] * len(reference["shape"]), reference["shape"]
    return place(like), list(local(like).shape)


def _key(reference: dict[str, Any]) -> str:
    return json.dumps(reference, sort_keys=True)


def _restore(base: Tensor, reference: dict[str, Any]) -> Tensor:
    dtype, shape = DTYPES[reference["dtype"]], tuple(reference["shape"])
    stride = tuple(reference["stride"]) if "stride" in reference else None
    if "offset" in reference:
        offset = reference["offset"]
        storage = base.untyped_storage()
        return torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset, shape, stride or ())
    if base.dtype != dtype:
        base = base.view(dtype).view(shape)
    if stride is None:
        return base
    return torch.empty_strided(shape, stride, dtype=dtype, device=base.device).copy_(base)
