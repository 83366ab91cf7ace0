"""Tensors of which this rank may hold only a shard (torch's DTensor), next to plain ones. Plain ones are left to torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from hocket import fast_paths


def mesh_of(tensor: Tensor) -> Any:
    """The DeviceMesh that a tensor is sharded over, or None for a plain tensor."""
    # Looking for the attribute in vain would take longer than the rest of what is done with a small tensor.
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return None
    return getattr(tensor, "device_mesh", None)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that one (foreach) operation can take together: plain ones, and those of each mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(mesh_of(tensor), []).append(tensor)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; a plain one as it is."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks of its mesh, each of which has to call this; a plain one as it is."""
    return tensor if mesh_of(tensor) is None else tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]


def place(tensor: Tensor) -> list[int]:
    """The index, in the whole tensor, of the first element of the shard that this rank holds."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # of torch.distributed.checkpoint's protocol
    return list(chunk.offsets)


def leads(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same shard.

    Of the meshes that a tensor lies on all alike, as those of tensor-parallel neighbours, that with rank 0 is the first.
    """
    mesh = mesh_of(tensor)
    placements = tensor.placements  # type: ignore[attr-defined]
    copies = [at for at, each in zip(mesh.get_coordinate() or (), placements, strict=False) if each.is_replicate()]
    return bool((mesh.mesh == 0).any()) and not any(copies)


def from_shard(shard: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, distributed as ``like`` is, of which this rank holds ``shard``. Nothing is sent."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    made: Tensor = DTensor.from_local(
        shard,
        mesh_of(like),
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=stride,
    )
    return made


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a full ``tensor`` that is distributed as ``like`` is, in a tensor of its own dtype.

    Every rank brings the same full tensor, of the shape of ``like``; nothing is sent. A tensor that is sharded already is
    returned as it is, or gathered where ``like`` is plain.
    """
    mesh = mesh_of(like)
    if mesh is None:
        return whole(tensor)
    if mesh_of(tensor) is not None:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    # A copy: a view of its shard would keep the full tensor alive.
    sharded: Tensor = replicated.redistribute(placements=like.placements).clone()  # type: ignore[attr-defined]
    return sharded.to(like.device)


def non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether any element of any tensor is not finite: a plain scalar, the same on every rank that holds shards of them."""
    plain = tensors and all(mesh_of(tensor) is None for tensor in tensors)
    if plain and (found := fast_paths.non_finite(tensors)) is not None:
        return found
    # torch 2.9 has no norm of sparse tensors.
    values = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    return ~torch.isfinite(total_norm(values, float("inf")))


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The joint norm of all elements of all tensors: a plain scalar, the same on every rank that holds shards of them.

    Without shards it is :func:`torch.nn.utils.get_total_norm` bit for bit. For shards it takes one reduction for each mesh
    that they lie on, however many they are; torch's function takes one for each tensor, and refuses a second mesh.

    Args:
        order: 2 or infinity, in which a NaN among shards counts as infinity.
    """
    if alike(tensors):
        return fast_paths.norm(tensors, order)
    norms = []
    for group in by_mesh(tensors):
        mesh = mesh_of(group[0])
        norms.append(get_total_norm(group, order) if mesh is None else _norm_over_mesh(group, mesh, order))
    if not norms:
        return get_total_norm([], order)
    return norms[0] if len(norms) == 1 else get_total_norm([norm.to(norms[0].device) for norm in norms], order)


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether there are any, and they are plain, dense, on one device and of one dtype: one foreach operation takes them."""
    if not tensors:
        return False
    device, dtype = tensors[0].device, tensors[0].dtype
    return all(
        mesh_of(each) is None and each.device == device and each.dtype is dtype and each.layout is torch.strided
        for each in tensors
    )


def _norm_over_mesh(tensors: Sequence[Any], mesh: Any, order: float) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Elements that several ranks hold would count several times in a sum over ranks; not so in a maximum.
    held: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if any(placement.is_partial() for placement in tensor.placements):
            placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=placements)
        copies = 1
        for size, placement in zip(mesh.shape, tensor.placements, strict=True):
            copies *= size if placement.is_replicate() else 1
        held.setdefault(copies, []).append(tensor.to_local())
    some = next(iter(held.values()))[0]
    norms = {}
    for copies, locals_ in held.items():
        if filled := [local for local in locals_ if local.numel()]:  # a rank may be without a part of a small tensor
            norms[copies] = get_total_norm(filled, order)
    if order == float("inf"):
        mine = get_total_norm(list(norms.values()), order) if norms else some.new_zeros(())
        mine = mine.nan_to_num(nan=order, posinf=order)  # a maximum over ranks need not keep NaN
    else:
        mine = sum((norm.square() / copies for copies, norm in norms.items()), start=some.new_zeros(()))
    reduced = DTensor.from_local(
        mine, mesh, [Partial("max" if order == float("inf") else "sum")] * mesh.ndim, run_check=False
    ).full_tensor()
    return reduced if order == float("inf") else reduced.sqrt()
