"""torch's GradScaler with one overflow decision per step: over all optimizers, every gradient of the step, and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, and adapt the scale to overflows.

    torch decides for each optimizer whether it steps. Here any overflow skips the step of all optimizers: gradients are
    clipped together, so those of one optimizer would corrupt the others'. Gradients may be computed several times in a
    step, as SAM does.

    Args: those of `torch.amp.GradScaler`.
    """

    #: 0-dimensional float32 on the device: 1.0 once a gradient of this step was non-finite; None before the first gradient.
    overflow: Tensor | None = None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, also when they were recomputed in the same step."""
        self._per_optimizer_states.pop(id(optimizer), None)
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # All optimizers share one flag, which is never cleared within a step. It exists for optimizers without gradients, too.
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflow = self.overflow = torch.zeros_like(found_inf) if self.overflow is None else self.overflow
        for flag in flags.values():
            overflow.copy_(torch.maximum(overflow, flag.to(overflow.device)))
        return {overflow.device: overflow}

    def begin(self) -> None:
        """Begin a new step, whatever the outcome of the last one."""
        self.overflow = None
        self._per_optimizer_states.clear()

    @property
    def scale_tensor(self) -> Tensor:
        """Return a copy of the scale on the device: float32, 0-dimensional. Call it after the first `scale`."""
        assert self._scale is not None
        return self._scale.clone()
