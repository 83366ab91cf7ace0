"""Tensors without storage: shapes, dtypes and devices of a computation, which takes no memory and next to no time.

torch's FakeTensorMode does the work. It is in a private module of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter

#: Tensors of so many elements are real, if all that they are computed from is.
_SMALL = 4096


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging, with a traceback, each operation that shapes refuse. It raises as well."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Hollow(FakeTensorMode):
    """Compute without storage, except small tensors that depend on no hollow one: these have values.

    So numbers that a process computes for itself have values: counts of samples, ranks of a mesh, rates of dropout by depth.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._small = _SMALL

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        hollow = any(isinstance(each, FakeTensor) for each in tensors)
        if function is torch.ops.c10d.allreduce_.default:
            # DistributedDataParallel reads the result from the future, which torch's fake collectives do not have: neither
            # those of hollow tensors, nor those of small real ones.
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            future.set_result(args[0])
            return args[0], _create_work_from_future(future).boxed()
        if hollow:
            return super().__torch_dispatch__(function, types, args, kwargs)
        if function.namespace != "c10d" and function is not torch.ops.aten._local_scalar_dense.default:
            with suppress(DataDependentOutputException, DynamicOutputShapeException):
                made = super().__torch_dispatch__(function, types, args, kwargs)
                if sum(each.numel() for each in tree_iter(made) if isinstance(each, Tensor)) > self._small:
                    return made
        return function(*args, **kwargs)

    def like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return a hollow tensor of the same shape, strides and dtype; a parameter for a parameter, and full for a shard.

        On ``device``, if it is given and the tensor is on the meta device.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        made = self._empty(tensor, tensor.size(), tensor.stride(), device if tensor.is_meta else tensor.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _empty(
        self, tensor: Tensor, size: Sequence[int], stride: Sequence[int], device: torch.device | None = None
    ) -> Tensor:
        small, self._small = self._small, -1
        try:
            with self:
                return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device or tensor.device)
        finally:
            self._small = small

    def view(self, tensor: Tensor, known: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Return a hollow tensor that shares memory with those in ``known`` as the real ones do; add its memory there."""
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            elements = storage.nbytes() // tensor.element_size()
            known[storage.data_ptr()] = tensor, self._empty(tensor, (elements,), (1,))
        full = known[storage.data_ptr()][1]
        if full.dtype != tensor.dtype:
            return self.like(tensor)
        return full.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def hollow_out(self, module: nn.Module) -> None:
        """Replace parameters and buffers by hollow ones, in place, but not lazy ones, without shapes. Tied ones stay tied."""
        memo: dict[int, tuple[Tensor, Tensor]] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not is_lazy(tensor) and not isinstance(tensor, FakeTensor):
                        known = memo.setdefault(id(tensor), (tensor, self.like(tensor)))
                        tensors[name] = known[1]  # type: ignore[assignment]  # a parameter for a parameter
