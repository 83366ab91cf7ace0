"""Sparse and quantized tensors: in checkpoints they are several plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongValue

#: By layout, the methods that return the indices, and whether the rows are compressed.
_COMPRESSED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sparse_csr": (Tensor.crow_indices, Tensor.col_indices),
    "sparse_bsr": (Tensor.crow_indices, Tensor.col_indices),
    "sparse_csc": (Tensor.ccol_indices, Tensor.row_indices),
    "sparse_bsc": (Tensor.ccol_indices, Tensor.row_indices),
}
_INTEGERS = ("qint8", "quint8", "qint32")
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)  # torch cannot copy others


def taken_apart(tensor: Tensor) -> dict[str, Any] | None:
    """Return the parts of a sparse or quantized tensor as copies; None for other tensors."""
    layout, dtype = (str(attribute).removeprefix("torch.") for attribute in (tensor.layout, tensor.dtype))
    if layout == "sparse_coo":
        parts = {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}
    elif layout in _COMPRESSED:
        outer, inner = _COMPRESSED[layout]
        parts = {"outer": outer(tensor), "inner": inner(tensor), "values": tensor.values()}
    elif tensor.is_quantized and dtype in _INTEGERS and tensor.qscheme() in (*_PER_TENSOR, *_PER_CHANNEL):
        parts = {"values": tensor.int_repr()}
        if tensor.qscheme() in _PER_TENSOR:
            parts |= {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        else:
            parts |= {"scale": tensor.q_per_channel_scales(), "zero_point": tensor.q_per_channel_zero_points()}
            parts["axis"] = tensor.q_per_channel_axis()
        layout = dtype
    else:
        return None
    copies = {name: part.detach().clone() if isinstance(part, Tensor) else part for name, part in parts.items()}
    return {"kind": layout, "shape": list(tensor.shape), **copies}


def put_together(parts: Mapping[str, Any]) -> Tensor:
    """Undo :func:`taken_apart`. Raises ValueError for parts that do not fit together."""
    kind, shape, values = parts["kind"], parts["shape"], parts["values"]
    try:
        if kind == "sparse_coo":
            indices, coalesced = parts["indices"], parts["coalesced"]
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
        if kind in _COMPRESSED:
            layout = getattr(torch, kind)
            return torch.sparse_compressed_tensor(
                parts["outer"], parts["inner"], values, shape, layout=layout, check_invariants=True
            )
        scale, zero_point, axis = parts["scale"], parts["zero_point"], parts.get("axis")
        if kind not in _INTEGERS or list(values.shape) != shape:
            raise WrongValue(f"a tensor of kind {kind!r}")
        if axis is None:
            tensor: Tensor = torch._make_per_tensor_quantized_tensor(values, scale, zero_point)
        elif scale.shape == zero_point.shape == (shape[axis],):
            tensor = torch._make_per_channel_quantized_tensor(values, scale, zero_point, axis)
        else:
            raise WrongValue(f"scales of shape {tuple(scale.shape)}")
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise WrongValue(f"the parts of a {kind} tensor do not fit together: {error}") from None
    return tensor


def dense_values(tensor: Tensor) -> Tensor:
    """Return the stored values of a sparse tensor, sharing its memory; a plain tensor unchanged."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def sized_like(tensor: Tensor, value: object) -> Tensor:
    """Return a tensor that ``value`` can be copied into: torch copies compressed sparse ones of equal numbers of elements only.

    The same tensor is changed in place.
    """
    compressed = str(tensor.layout).removeprefix("torch.") in _COMPRESSED
    if compressed and isinstance(value, Tensor) and tensor.layout is value.layout and tensor._nnz() != value._nnz():
        with torch.no_grad():
            tensor.resize_as_sparse_(value)
    return tensor
