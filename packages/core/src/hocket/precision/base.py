"""The base class of precisions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.data.nesting import map_tensors
from hocket.data.stateful import Stateful
from hocket.optim import optimizers

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class Precision(Stateful):
    """Base class of precisions; by default it keeps the model's dtypes. See :mod:`hocket.hookspecs.precision`.

    Example:
        >>> import hocket, torch
        >>> class BF16Autocast(hocket.Precision):
        ...     compute_dtype = torch.bfloat16
        ...     def forward_context(self):
        ...         return torch.autocast(self.device.type, torch.bfloat16)
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision=BF16Autocast(), device="cpu")
    """

    # `hocket.hookspecs.PrecisionLike` documents these attributes.
    device: torch.device = torch.device("cpu")
    input_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype = torch.float32
    own_loop = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """See :meth:`hocket.hookspecs.PrecisionHooks.convert_module`."""
        return module

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """See :meth:`hocket.hookspecs.PrecisionHooks.check_optimizer`."""
        return True

    def convert_batch(self, batch: Batch) -> Any:
        """See :meth:`hocket.hookspecs.PrecisionHooks.convert_batch`."""
        dtype = self.input_dtype
        if dtype is None:
            return batch
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)

    def begin_step(self, name: str) -> bool:
        """See :meth:`hocket.hookspecs.PrecisionHooks.begin_step`."""
        return True

    def forward_context(self) -> AbstractContextManager[Any]:
        """See :meth:`hocket.hookspecs.PrecisionHooks.forward_context`."""
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """See :meth:`hocket.hookspecs.PrecisionHooks.scale_loss`."""
        return loss

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """See :meth:`hocket.hookspecs.PrecisionHooks.unscale_gradients`."""
        return True

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the context of ``backward`` under `hocket.Runtime`. Under the Trainer, wrap the action `backward` instead."""
        return nullcontext()

    def overflowed(self, all_reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> bool:
        """See :meth:`hocket.hookspecs.PrecisionHooks.overflowed`."""
        return False

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], torch.Tensor]) -> bool:
        """See :meth:`hocket.hookspecs.PrecisionHooks.step_optimizer`."""
        # Optimizers such as LBFGS have to compute gradients again within a step; all others must not.
        optimizers.step(optimizer, closure)
        return True
