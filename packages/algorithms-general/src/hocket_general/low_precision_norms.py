"""What low-precision-layernorm and low-precision-groupnorm share: norms in the dtype that autocast computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Phase
from hocket.surgery import NoEffectWarning, recast
from hocket_general.module_substitution import Substitution, SurgeryAlgorithm, not_plain

if TYPE_CHECKING:
    from hocket.state.state import State


class LowPrecisionNorm(nn.Module):
    """A norm that runs in autocast's dtype: its input, weight and bias are cast to it. Without autocast, the norm as it was."""

    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        """Normalise in the dtype of autocast; torch's kernels accumulate in float32."""
        device = input.device.type
        if input.is_meta or not torch.is_autocast_enabled(device) or input.dtype == torch.float64:
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return self._normalize(input.to(dtype), weight, bias)

    def _normalize(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class LowPrecisionRule(Substitution):
    """Replace norms of one class by a `LowPrecisionNorm`."""

    becomes = "in the dtype of autocast"
    made = LowPrecisionNorm

    def __init__(self, method: str, plain: type[nn.Module], low: type[LowPrecisionNorm]) -> None:
        self.method, self._plain, self._low = method, plain, low
        self.nothing = f"it has no {plain.__name__}. Remove {method}."

    def wants(self, module: nn.Module) -> bool:
        return isinstance(module, self._plain) and not isinstance(module, LowPrecisionNorm)

    def obstacle(self, module: nn.Module) -> str:
        return not_plain(module, [self._plain])

    def build(self, module: Any) -> nn.Module:
        return recast(module, self._low)


class LowPrecisionAlgorithm(SurgeryAlgorithm):
    """Base of the two algorithms: replaces norms if the precision autocasts to 16 bits."""

    phase = Phase.PRECISION

    def apply(self, event: Event, state: State) -> None:
        """Replace norms of the model, or warn that the precision leaves nothing to do."""
        device = state.device.type
        with state.bus.forward_context():
            low = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device).itemsize == 2
        if low:
            super().apply(event, state)
            return
        warn(
            f"{self.substitution.method} has no effect: precision '{type(state.precision).__name__}' does not autocast to 16 "
            "bits. Pass «precision='bf16'», or remove it.",
            NoEffectWarning,
        )
