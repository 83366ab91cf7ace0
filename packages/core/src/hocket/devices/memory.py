"""When memory runs out."""

from __future__ import annotations

import torch

#: Of mps, xpu and the CUDA runtime; of cuDNN, cuBLAS and cuSPARSE (``CUBLAS_STATUS_ALLOC_FAILED``); of torch's CPU allocator.
_OUT_OF_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory. Libraries below torch, and mps, raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )
