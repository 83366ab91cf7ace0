"""Functions on tensors that may be sharded (torch's DTensor) or plain. Plain tensors are passed on to torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from hocket.basics import fast_paths


def mesh_of(tensor: Tensor) -> Any:
    """Return the DeviceMesh that a tensor is sharded over, or None for a plain tensor."""
    # A failed attribute look-up would take longer than the other operations on a small tensor.
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return None
    return getattr(tensor, "device_mesh", None)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors so that one (foreach) operation can take each group: plain tensors, and those of each mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(mesh_of(tensor), []).append(tensor)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory, or a plain tensor unchanged."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """Gather the full tensor from all ranks of its mesh, which all have to call this, or return a plain tensor unchanged."""
    return tensor if mesh_of(tensor) is None else tensor.full_tensor()  # type: ignore[attr-defined]


def place(tensor: Tensor) -> list[int]:
    """Return the index, in the full tensor, of the first element of this rank's shard."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # protocol of torch.distributed.checkpoint
    return list(chunk.offsets)


def leads(tensor: Tensor) -> bool:
    """Whether this rank is the first of the ranks that hold the same shard.

    If a tensor exists identically on several meshes, such as those of tensor-parallel neighbours, the mesh with rank 0 is
    the first.
    """
    mesh = mesh_of(tensor)
    placements = tensor.placements  # type: ignore[attr-defined]
    copies = [at for at, kind in zip(mesh.get_coordinate() or (), placements, strict=False) if kind.is_replicate()]
    return bool((mesh.mesh == 0).any()) and not any(copies)


def from_shard(shard: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor, distributed like ``like``, of which this rank holds ``shard``. Nothing is sent."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    distributed: Tensor = DTensor.from_local(
        shard,
        mesh_of(like),
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=stride,
    )
    return distributed


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Distribute a full ``tensor`` like ``like``, keeping its dtype, and return this rank's part of it.

    Every rank passes the same full tensor, of the shape of ``like``; nothing is sent. A tensor that is already sharded is
    returned unchanged, or gathered if ``like`` is plain.
    """
    mesh = mesh_of(like)
    if mesh is None:
        return full(tensor)
    if mesh_of(tensor) is not None:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    # A copy: a view of its shard would keep the full tensor alive.
    sharded: Tensor = replicated.redistribute(placements=like.placements).clone()  # type: ignore[attr-defined]
    return sharded.to(like.device)


def non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any element is non-finite, as a plain scalar that is identical on all ranks holding shards."""
    plain = tensors and all(mesh_of(tensor) is None for tensor in tensors)
    if plain and (result := fast_paths.non_finite(tensors)) is not None:
        return result
    # torch 2.9 does not implement norms of sparse tensors.
    values = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    return ~torch.isfinite(total_norm(values, float("inf")))


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the joint norm of all elements, as a plain scalar that is identical on all ranks holding shards.

    Without shards the result is bitwise identical to :func:`torch.nn.utils.get_total_norm`. Shards take one reduction for
    each mesh, regardless of their number; torch's function takes one for each tensor, and refuses a second mesh.

    Args:
        order: 2 or infinity. For infinity, a NaN among shards counts as infinity.
    """
    if uniform(tensors):
        return fast_paths.norm(tensors, order)
    norms = []
    for group in by_mesh(tensors):
        mesh = mesh_of(group[0])
        norms.append(get_total_norm(group, order) if mesh is None else _norm_over_mesh(group, mesh, order))
    if not norms:
        return get_total_norm([], order)
    return norms[0] if len(norms) == 1 else get_total_norm([norm.to(norms[0].device) for norm in norms], order)


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, as a plain float32 vector, identical on all ranks holding shards.

    It takes one foreach operation for each mesh, device and dtype, and one reduction for each mesh, regardless of the number
    of tensors.
    """
    if uniform(tensors) and tensors[0].dtype is torch.float32:
        return torch.stack(torch._foreach_norm(list(tensors)))
    tensors = [_values(tensor) for tensor in tensors]
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((mesh_of(tensor), tensor.device, tensor.dtype), []).append(index)
    norm_of: dict[int, Tensor] = {}
    for (mesh, _, dtype), indices in kinds.items():
        locals_ = [local(tensors[index]) for index in indices]
        precise = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms = torch.stack(torch._foreach_norm(locals_, 2, precise)).float()
        if mesh is not None:
            copies = [_copies(tensors[index]) for index in indices]
            squares = torch.stack([square / n for square, n in zip(norms.square().unbind(), copies, strict=True)])
            norms = _reduce(squares, mesh, "sum").sqrt()
        norm_of.update(zip(indices, norms.unbind(), strict=True))
    device = tensors[0].device
    return torch.stack([norm_of[index].to(device) for index in range(len(tensors))])


def sum_over_shards(values: Tensor, like: Tensor) -> Tensor:
    """Return the sum over ranks of what each computed from its shard of ``like``, counting copies of a shard once.

    Returns ``values`` if ``like`` is plain. All ranks of the mesh have to call this. Integers stay integers.
    """
    if (mesh := mesh_of(like)) is None:
        return values
    total, copies = _reduce(values, mesh, "sum"), _copies(like)
    return (
        total if copies == 1 else torch.div(total, copies, rounding_mode=None if total.is_floating_point() else "floor")
    )


def uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are plain, dense, of one device and one dtype, so that one foreach operation takes them all.

    False for an empty sequence.
    """
    if not tensors:
        return False
    device, dtype = tensors[0].device, tensors[0].dtype
    return all(
        mesh_of(tensor) is None and tensor.device == device and tensor.dtype is dtype and tensor.layout is torch.strided
        for tensor in tensors
    )


def _norm_over_mesh(tensors: Sequence[Any], mesh: object, order: float) -> Tensor:
    # Elements held by several ranks would count several times in a sum over ranks, but not in a maximum.
    held: dict[int, list[Tensor]] = {}
    for tensor in map(_values, tensors):
        held.setdefault(_copies(tensor), []).append(local(tensor))
    some = next(iter(held.values()))[0]
    norms = {}
    for copies, locals_ in held.items():
        if filled := [local for local in locals_ if local.numel()]:  # a rank's shard of a small tensor may be empty
            norms[copies] = get_total_norm(filled, order)
    if order == float("inf"):
        mine = get_total_norm(list(norms.values()), order) if norms else some.new_zeros(())
        mine = mine.nan_to_num(nan=order, posinf=order)  # a maximum over ranks need not keep NaN
    else:
        mine = sum((norm.square() / copies for copies, norm in norms.items()), start=some.new_zeros(()))
    reduced = _reduce(mine, mesh, "max" if order == float("inf") else "sum")
    return reduced if order == float("inf") else reduced.sqrt()


def _values(tensor: Any) -> Any:
    """Return a tensor whose elements can be read: without partial sums, and of a sparse tensor its values."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if mesh_of(tensor) is None or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def _copies(tensor: Any) -> int:
    """Return how many ranks hold each element of a DTensor."""
    held = zip(mesh_of(tensor).shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in held if placement.is_replicate())


def _reduce(values: Tensor, mesh: Any, operation: str) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    reduced: Tensor = DTensor.from_local(values, mesh, [Partial(operation)] * mesh.ndim, run_check=False).full_tensor()
    return reduced
