"""Choose the bytes that a checkpoint stores: shared memory only once, and of sharded tensors this rank's shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.basics.dtensors import leads, local, mesh_of, place
from hocket.errors import WrongType
from hocket_checkpoints.storage import header
from hocket_checkpoints.storage.references import SIZES, is_dense
from hocket_checkpoints.storage.shards import dtype_name


@dataclass(slots=True)
class Stored:
    """A tensor to store, and the references to it, which get file and name once these are known."""

    name: str
    tensor: Tensor
    references: list[dict[str, Any]]


class Collector:
    """Collect a tree's tensors one by one (`add` is an argument of `tree_json.to_json`), then list the tensors to store."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Tensor, dict[str, Any]]] = []
        self._shards: dict[Any, list[tuple[str, Tensor, dict[str, Any]]]] = {}
        #: For each sharded tensor: its path, its reference, and this rank's piece, unless another rank writes it.
        self.sharded: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = []

    def add(self, path: str, value: Any) -> dict[str, Any] | None:
        """Return an incomplete reference to a tensor; None for anything else. Raises TypeError for unsupported tensors."""
        if not isinstance(value, Tensor):
            return None
        tensor = _plain(path, local(value.detach()))
        reference: dict[str, Any] = {"dtype": dtype_name(tensor), "shape": list(value.shape)}
        if mesh_of(value) is None:
            self._found.append((path, tensor, reference))
            return reference
        reference["pieces"], piece = [], None
        if tensor.numel() and leads(value):
            piece = {"begin": place(value), "shape": list(tensor.shape)}
            key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            self._shards.setdefault(key, []).append((path, tensor, piece))
        self.sharded.append((path, reference, piece))
        return reference

    def stored(self, whole: bool = True) -> list[Stored]:
        """Return the tensors to store in the order in which they were found; unless ``whole``, the shards only."""
        made: list[Stored] = []
        taken = {"__metadata__"}
        for group in [*(_overlapping(self._found) if whole else ()), *self._shards.values()]:
            path, tensor, reference = group[0]
            name, count = path, 1
            while name in taken:
                count += 1
                name = f"{path}~{count}"
            taken.add(name)
            views = {(t.data_ptr(), t.dtype, t.shape, t.stride()) for _, t, _ in group}
            references = [reference for _, _, reference in group]
            if "begin" not in reference:
                tensor = _dense(tensor, references) if len(views) == 1 else _common(group)
            if dtype_name(tensor) not in header.NAMES:
                tensor = tensor.contiguous().view(-1).view(torch.uint8)
            made.append(Stored(name, tensor, references))
        return made


def unstorable(value: Tensor) -> str:
    """Return what keeps a tensor out of checkpoints, such as its layout; empty for plain dense tensors."""
    if hasattr(value, "__tensor_flatten__"):
        return type(value).__name__
    quantized = f"quantized tensor ({value.dtype}, {value.qscheme()})" if value.is_quantized else ""
    kinds = {quantized: value.is_quantized, "nested tensor": value.is_nested}
    kinds |= {f"{value.layout} tensor": value.layout is not torch.strided, "tensor on the meta device": value.is_meta}
    return next((kind for kind, found in kinds.items() if found), "") or (
        "" if dtype_name(value) in SIZES else str(value.dtype)
    )


def _plain(path: str, value: Tensor) -> Tensor:
    tensor = value.detach().resolve_conj().resolve_neg()
    if kind := unstorable(tensor):
        raise WrongType(
            f"{path or 'the tree'}: a {kind} cannot go into a checkpoint. Give plain dense tensors, as from "
            "full_tensor(), to_local(), dequantize() or to_dense()."
        )
    return tensor.as_subclass(Tensor)


Found = tuple[str, Tensor, dict[str, Any]]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the one behind the last."""
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _storage(tensor: Tensor) -> tuple[str, int, int]:
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr(), storage.nbytes()


def _overlapping(found: Iterable[Found]) -> list[list[Found]]:
    """Return groups of tensors that share bytes of one storage, in the order of their first members; empty ones share none.

    Arrays of other libraries may overlap in several storages, which no single view could cover.
    """
    order = {id(each[2]): position for position, each in enumerate(found)}
    groups = [[each] for each in found if not each[1].numel()]
    rest = sorted((each for each in found if each[1].numel()), key=lambda e: (_storage(e[1]), _span(e[1])[0]))
    storage, end = None, 0
    for each in rest:
        start, stop = _span(each[1])
        if _storage(each[1]) == storage and start < end:
            groups[-1].append(each)
            end = max(end, stop)
        else:
            groups.append([each])
            storage, end = _storage(each[1]), stop
    for group in groups:
        group.sort(key=lambda e: order[id(e[2])])
    return sorted(groups, key=lambda group: order[id(group[0][2])])


def _dense(tensor: Tensor, references: list[dict[str, Any]]) -> Tensor:
    """Return the tensor, and record an unusual memory format in the references."""
    if not tensor.is_contiguous() and is_dense(tensor.shape, tensor.stride()):
        for reference in references:
            reference["stride"] = list(tensor.stride())
    return tensor


def _common(group: list[Found]) -> Tensor:
    """Return one flat tensor over the memory of several views, and record each view's offset in its reference."""
    storage = group[0][1].untyped_storage()
    dtypes = {tensor.dtype for _, tensor, _ in group}
    start = min(_span(tensor)[0] for _, tensor, _ in group)
    end = max(_span(tensor)[1] for _, tensor, _ in group)
    start -= (start - storage.data_ptr()) % 16  # so that every view begins at a multiple of its element's size
    for _, tensor, reference in group:
        reference["stride"] = list(tensor.stride())
        reference["offset"] = (tensor.data_ptr() - start) // tensor.element_size()
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    size = dtype.itemsize
    flat = torch.empty(0, dtype=dtype, device=group[0][1].device)
    return flat.set_(storage, (start - storage.data_ptr()) // size, ((end - start) // size,), (1,))
