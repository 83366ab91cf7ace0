"""Memory for large tensors that are about to be filled: in huge pages where Linux has them."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Bytes from which a tensor is worth asking for: below, few whole pages of 2 MiB lie in it.
_LARGE = 1 << 22


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on the CPU. The kernel clears new memory page by page, which takes longer than reading a file
    into it; of huge pages it clears a few hundred times fewer.
    """
    return advise(torch.empty(shape, dtype=dtype))


def advise(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a CPU tensor that nobody has written to yet."""
    if tensor.nbytes >= _LARGE and (madvise := _madvise()) is not None:
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        size = (tensor.data_ptr() + tensor.nbytes - start) // page * page
        madvise(start, size, mmap.MADV_HUGEPAGE)  # advice: where it cannot be followed nothing changes
    return tensor


@cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
