"""Huge pages, if Linux has them, for memory that is filled repeatedly.

Copying 500 MB into them takes 0.05 s instead of 0.12 s. They do not pay for memory that is filled once: finding huge pages may
take the kernel longer than they save.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

#: Minimum bytes of a tensor in huge pages: smaller ones contain few full pages of 2 MiB.
_LARGE = 1 << 22


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
