"""torch's GradScaler, with one verdict per step: over all optimizers, every gradient of the step, and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScaler(torch.amp.GradScaler):
    """Multiplies the loss, divides the gradients, and adapts the factor to where they overflow.

    torch decides for each optimizer whether it steps. Here whatever overflowed anywhere holds all of them back: gradients
    are clipped together, so those of one optimizer would spoil the others'. Gradients may be computed several times in a
    step, as SAM does.

    Args: those of `torch.amp.GradScaler`.
    """

    #: 0-dimensional float32 on the device: 1.0 once a gradient of this step was not finite; None before the first.
    overflow: Tensor | None = None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide its gradients by the scale, those that were computed anew in the same step too."""
        self._per_optimizer_states.pop(id(optimizer), None)
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # One flag that all optimizers share, and that is never unmarked. It is there for optimizers without a gradient, too.
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflow = self.overflow = torch.zeros_like(found_inf) if self.overflow is None else self.overflow
        for flag in flags.values():
            overflow.copy_(torch.maximum(overflow, flag.to(overflow.device)))
        return {overflow.device: overflow}

    def begin(self) -> None:
        """A new step, whatever became of the last one."""
        self.overflow = None
        self._per_optimizer_states.clear()

    @property
    def scale_tensor(self) -> Tensor:
        """The factor, as a tensor of its own on the device: float32, 0-dimensional. After the first `scale`."""
        assert self._scale is not None
        return self._scale.clone()
