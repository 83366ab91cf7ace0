"""Weights stored in 16 bits."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hocket import Precision, Task
from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue

if TYPE_CHECKING:
    from hocket.state.state import State

_LOW = (torch.bfloat16, torch.float16)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class StoredLow(Precision):
    """Base class of ``bf16-true`` and ``fp16-true``.

    Parameters and buffers, hence gradients and optimizer state too, are stored in 16 bits. Only torch's normalisation
    layers are stored and computed in float32. The model and each of its layers get floating-point inputs in the dtype of
    their weights; the loss gets the outputs in float32, and targets as loaded.

    The model is changed in place, permanently: the casts stay on it as hooks.
    """

    dtype: ClassVar[torch.dtype]
    own_loop = True  # the model that `hocket.Runtime.setup` returns has float32 outputs

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers to 16 bits, and add hooks that cast inputs and outputs."""
        norms = [part for part in module.modules() if isinstance(part, _NORMS)]
        kept = {tensor for norm in norms for tensor in _own(norm)}
        for part in module.modules():
            if isinstance(part, _NORMS):
                part._apply(partial(_cast, dtype=torch.float32), recurse=False)
                part.register_forward_pre_hook(partial(_cast_inputs, dtype=torch.float32), with_kwargs=True)
                part.register_forward_hook(partial(_cast_outputs, dtype=self.dtype))
                continue
            if part is module or any(tensor.is_floating_point() for tensor in _own(part)):
                part.register_forward_pre_hook(partial(_cast_inputs, dtype=self.dtype), with_kwargs=True)
            part._apply(lambda t: t if t in kept else _cast(t, self.dtype), recurse=False)
        if isinstance(module, Task) and module.owns_steps:  # whose loss functions call its parts
            for part in module.children():
                part.register_forward_hook(partial(_cast_outputs, dtype=torch.float32))
        return module

    def after_forward(self, state: State) -> None:
        """Convert outputs to float32 for the loss."""
        state.outputs = _widened(state.outputs)

    def eval_after_forward(self, state: State) -> None:
        """Convert outputs to float32 for loss and metrics."""
        state.outputs = _widened(state.outputs)

    def predict_after_forward(self, state: State) -> None:
        """Convert outputs to float32."""
        state.outputs = _widened(state.outputs)


class BF16True(StoredLow):
    """Store weights, gradients and optimizer state in bfloat16; normalisation layers and the loss stay in float32.

    Takes half the memory of ``bf16`` and is less exact: an update smaller than 1/256 of a weight is rounded away.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="bf16-true", device="cpu")
        >>> trainer.model_state_dict()["weight"].dtype
        torch.bfloat16
    """

    dtype = compute_dtype = torch.bfloat16


class FP16True(StoredLow):
    """Store weights in float16, for evaluation, prediction and careful training; normalisation layers and loss in float32.

    Gradients smaller than 6e-8 vanish and larger ones than 65504 overflow. Loss scaling does not help where gradients are
    stored in 16 bits: ``fp16`` and ``bf16-true`` train better. Raises ValueError for an optimizer whose ``eps`` is 0 in
    float16, such as AdamW's default: it would divide by zero.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="fp16-true", device="cpu")
        >>> trainer.model_state_dict()["weight"].dtype
        torch.float16
    """

    dtype = compute_dtype = torch.float16

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Refuse optimizers that would divide by zero."""
        for group in optimizer.param_groups:
            eps = group.get("eps")
            low = any(parameter.dtype is torch.float16 for parameter in group["params"])
            if low and isinstance(eps, float) and not torch.tensor(eps, dtype=torch.float16).item():
                raise WrongValue(
                    f"{type(optimizer).__name__} has «eps={eps:g}», which is 0 in float16, so it would divide by zero. Give "
                    "it «eps=1e-4», or train with «precision='fp16'» or 'bf16-true'."
                )
        return True


def _own(module: nn.Module) -> chain[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> tuple[Any, Any] | None:
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].dtype is dtype:
        return None  # nothing to do, as between most layers; looking further takes 3 µs a layer
    return map_tensors(partial(_cast, dtype=dtype), args), map_tensors(partial(_cast, dtype=dtype), kwargs)


def _cast_outputs(module: nn.Module, args: Any, outputs: Any, *, dtype: torch.dtype) -> Any:
    return map_tensors(partial(_cast, dtype=dtype), outputs)


def _widened(outputs: Any) -> Any:
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, outputs)
