"""Degrees of parallelism: the layout of ranks as a mesh, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from hocket.errors import WrongValue

#: The axes of a mesh, outermost first: neighbouring ranks, on one machine, compute one forward pass together.
AXES = ("replicate", "shard", "tensor")


def degrees(world_size: int, given: Mapping[str, int | None], strategy: str) -> dict[str, int]:
    """Return the degree of every axis of :data:`AXES`, outermost first; their product is ``world_size``.

    Args:
        given: degrees by axis; an omitted one is 1. One of them may be None: it is derived from the others.
        strategy: the strategy's name, for messages.

    Raises:
        ValueError: a degree is not a positive int, two are None, or the product is not the number of ranks.
    """
    found = {axis: given.get(axis, 1) for axis in AXES}
    for axis, degree in found.items():
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise WrongValue(
                f"«strategy='{strategy}'» was given {axis}={degree!r}: give a positive int, or «None» for the remaining ranks."
            )
    known = prod(degree for degree in found.values() if degree is not None)
    open_axes = [axis for axis, degree in found.items() if degree is None]
    if len(open_axes) > 1:
        raise WrongValue(
            f"«strategy='{strategy}'» was given None for {' and '.join(open_axes)}, but only one of them can be derived. "
            f"Give all but one, such as {_typed(strategy, {open_axes[-1]: 2})}."
        )
    if open_axes and world_size % known == 0:
        return {axis: world_size // known if degree is None else degree for axis, degree in found.items()}
    if open_axes or known != world_size:
        product = " × ".join(f"{axis}={'?' if degree is None else degree}" for axis, degree in found.items())
        comes_to = f"a multiple of {known}" if open_axes else str(known)
        fits = _fitting(world_size, {axis: degree for axis, degree in found.items() if axis in given})
        raise WrongValue(
            f"«strategy='{strategy}'»: {product} is {comes_to}, but {world_size} ranks were started. Start "
            f"{known if not open_axes else -(-world_size // known) * known} (torchrun --nproc-per-node …), or write "
            f"{_typed(strategy, fits)}."
        )
    return {axis: degree for axis, degree in found.items() if degree is not None}


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> Any:
    """Return a ``DeviceMesh`` over all ranks with named axes: ``"shard"``, and the other axes that have several ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    kept = {axis: sizes[axis] for axis in AXES if axis == "shard" or sizes[axis] > 1}
    mesh = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if mesh.ndim > 1:
        mesh._flatten("all")  # makes a reduction over all axes one operation
    return mesh


def data_mesh(mesh: Any) -> Any:
    """Return the one or two axes over which data is divided and parameters are replicated and sharded."""
    names = [axis for axis in ("replicate", "shard") if axis in mesh.mesh_dim_names]
    return mesh[tuple(names)] if len(names) < mesh.ndim else mesh


def data_group(mesh: Any) -> Any:
    """Return the process group of the ranks of :func:`data_mesh`."""
    over = data_mesh(mesh)
    return over.get_group() if over.ndim == 1 else over._flatten("data").get_group()


def _fitting(world_size: int, given: Mapping[str, int | None]) -> dict[str, int]:
    """Return degrees near the given ones whose product is the number of ranks: the largest divisors, the last axis first."""
    left, fits = world_size, {}
    for axis in reversed(list(given)):
        wanted = given[axis] or left
        fits[axis] = max(degree for degree in range(1, min(wanted, left) + 1) if left % degree == 0)
        left //= fits[axis]
    if left > 1:
        fits["shard"] = fits.get("shard", 1) * left
    return {axis: fits[axis] for axis in AXES if axis in fits}


def _typed(strategy: str, sizes: Mapping[str, int]) -> str:
    return f"«strategy={{'{strategy}': {dict(sizes)!r}}}»"
