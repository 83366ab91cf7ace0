"""FLOPs that torch's counter does not know: of fused layers, and of backward passes that do not run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def _flops_of_layer(inputs: Any, of_inputs: Any, of_state: Any, *rest: Any, **named: Any) -> int:
    """Return the FLOPs of a layer of an LSTM, one operation on the CPU, from shapes: (T, B, I), (4H, I), (4H, H)."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(of_inputs) + math.prod(of_state))


def _backward_of_layer(flops: int, inputs: Tensor, of_inputs: Tensor, of_state: Tensor) -> int:
    """Return those of its backward pass: the state of the first step has no gradient, and the inputs may have none."""
    steps, state = inputs.size(0), of_state.numel() / (of_inputs.numel() + of_state.numel())
    gradients = (1 - state) * inputs.requires_grad + state * (1 - 1 / steps)
    return round(flops * (gradients + of_inputs.requires_grad))


def _flops_of_bilinear(first: Any, weight: Any, second: Any, *rest: Any, **named: Any) -> int:
    """Return the FLOPs of `torch.nn.Bilinear`: first by weight, and that by second; (B, I), (O, I, J), (B, J)."""
    outputs, width, other = weight
    return 2 * math.prod(first[:-1]) * outputs * other * (width + 1)


#: Operations that torch's counter does not know.
FUSED = {torch.ops.aten.mkldnn_rnn_layer: _flops_of_layer, torch.ops.aten._trilinear: _flops_of_bilinear}


class BackwardCounter(TorchDispatchMode):
    """Count what the backward pass of each operation will take: as much for each operand with a gradient as its forward.

    No backward pass runs, because torch would start threads for it, after which no process could be forked any more.
    Attention recomputes one of its two products (Dao et al. 2022, arXiv 2205.14135, appendix B): five products for two.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counter = counter
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        before = self._counter.get_total_flops()
        made = function(*args, **(kwargs or {}))
        flops = self._counter.get_total_flops() - before
        if flops and torch.is_grad_enabled() and function.overloadpacket is torch.ops.aten.mkldnn_rnn_layer:
            self.flops += _backward_of_layer(flops, *args[:3])
        elif flops and torch.is_grad_enabled():
            tensors = [each for each in args if isinstance(each, Tensor)]
            if "attention" in str(function):
                self.flops += flops * 5 // 2 if any(each.requires_grad for each in tensors) else 0
            else:  # a bias takes no product
                factors = tensors[-2:] if "addmm" in str(function) or "addbmm" in str(function) else tensors[:2]
                factors = tensors if function.overloadpacket is torch.ops.aten._trilinear else factors
                self.flops += flops * sum(each.requires_grad for each in factors)
        return made
