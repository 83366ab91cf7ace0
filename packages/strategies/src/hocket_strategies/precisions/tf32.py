"""TensorFloat-32 matrix products."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hocket import Precision, hookimpl

if TYPE_CHECKING:
    from hocket.state.state import State


class TF32(Precision):
    """Train in 32-bit floats; matrix products may keep 10 bits of the mantissa, where the hardware has TensorFloat-32.

    Such hardware is NVIDIA's Ampere and later; elsewhere results are those of ``fp32``. The setting is process-wide: it is
    set while forward, loss and backward of this Trainer run, and restored after each. Convolutions are not affected: torch
    lets them use TensorFloat-32 anyway, unless ``torch.backends.cudnn.allow_tf32`` is False.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="tf32", device="cpu")
    """

    own_loop = True

    def forward_context(self) -> AbstractContextManager[Any]:
        """Allow TensorFloat-32 in matrix products."""
        return _allowed()

    def backward_context(self) -> AbstractContextManager[Any]:
        """Allow TensorFloat-32 in matrix products."""
        return _allowed()

    @hookimpl(wrapper=True)
    def backward(self, state: State, loss: torch.Tensor) -> Generator[None, bool, bool]:
        """Allow TensorFloat-32 in the backward pass."""
        with self.backward_context():
            return (yield)


@contextmanager
def _allowed() -> Iterator[None]:
    new = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # not in its stubs
    before = [backend.fp32_precision for backend in new]
    old = _legacy()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old)
        for backend, precision in zip(new, before, strict=True):
            backend.fp32_precision = precision


def _legacy() -> str:
    """Return the older of torch's two settings; reading it raises if the newer one contradicts it."""
    get: Callable[[], str] = torch.get_float32_matmul_precision
    try:
        return get()
    except RuntimeError:
        return "highest"  # torch's default; the actual value cannot be read
