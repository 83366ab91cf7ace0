"""Double precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from hocket import Precision
from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue

_WIDER = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


class FP64(Precision):
    """Compute in 64-bit floats throughout: weights, buffers, inputs, loss, and tensors made inside the model.

    Floating-point tensors become float64 and complex ones complex128; integers and bools are unchanged. While forward and
    loss run, float64 is torch's default dtype, so that ``torch.zeros(3)`` in a model is double too.
    Use it for gradient checks and as a reference for other precisions; slow on most GPUs.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="fp64", device="cpu")
        >>> trainer.model_state_dict()["weight"].dtype
        torch.float64
    """

    input_dtype = torch.float64

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers to double precision, in place. Raises ValueError on a device without it (mps)."""
        tensors = list(chain(module.parameters(), module.buffers()))
        if any(tensor.device.type == "mps" for tensor in tensors):
            raise WrongValue(
                "Apple GPUs have no 64-bit floats, so «precision='fp64'» cannot run on mps. Pass «device='cpu'»."
            )
        module.double()
        for tensor in tensors:
            if tensor.dtype in _WIDER:  # module.double() skips complex tensors
                tensor.data = tensor.data.to(_WIDER[tensor.dtype])
        return module

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch with floating-point and complex tensors in double precision."""
        return map_tensors(_widen, batch)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Make float64 the default dtype."""
        return _default_dtype()


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
