"""float16 autocast with dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket import Precision
from hocket.optim.optimizers import needs_closure
from hocket_strategies.precisions.loss_scaling import LossScaler

if TYPE_CHECKING:
    from hocket.state import State

_DEVICES = ("cpu", "cuda")


class FP16(Precision):
    """Forward and loss under float16 autocast, the loss scaled so that small gradients do not vanish; weights in 32 bits.

    Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), by way of `torch.amp.GradScaler`: the scale
    falls when gradients overflow and grows after ``growth_interval`` steps without. A batch whose gradients overflow is not
    trained on: no optimizer steps, on any rank, and schedules stay where they are. Such gradients are not what the
    Trainer's ``nonfinite=`` is about; a loss that is not finite is.

    Logs ``precision/loss_scale``, what the next batch is scaled by, and ``precision/skipped_steps``, those so far.
    Whether to step has to be known on the host, so it waits for the device once per computed gradient.

    Args:
        init_scale: the first factor.
        growth_factor: what it grows by; more than 1.
        backoff_factor: what it falls by; between 0 and 1.
        growth_interval: so many steps in a row without overflow until it grows.
        min_scale: an overflow that makes it fall below this has another cause and raises FloatingPointError.

    Raises:
        ValueError: an argument is out of its range; later, a device other than cpu and cuda, or an optimizer such as LBFGS
            that computes gradients itself and could not be held back.
    """

    compute_dtype = torch.float16
    own_loop = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 2.0**-14,
    ) -> None:
        if not (0 < min_scale <= init_scale < float("inf")):
            raise ValueError(
                f"FP16 was given init_scale={init_scale} and min_scale={min_scale}: give positive numbers, the first at "
                "least as large as the second, such as 65536.0 and 2**-14."
            )
        if not growth_factor > 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"FP16 was given growth_factor={growth_factor}, backoff_factor={backoff_factor} and "
                f"growth_interval={growth_interval}: the first is more than 1, the second between 0 and 1, the third at "
                "least 1, such as 2.0, 0.5 and 2000."
            )
        self._options: dict[str, Any] = {
            "init_scale": float(init_scale),
            "growth_factor": float(growth_factor),
            "backoff_factor": float(backoff_factor),
            "growth_interval": growth_interval,
        }
        self.min_scale = min_scale
        #: Batches that were not trained on because their gradients overflowed.
        self.skipped_steps = 0
        self._scaler = LossScaler("cpu", **self._options)
        self._skip = False
        #: Whether a step was taken, or left out, that the scale does not know of yet.
        self._decided = False

    # --- before training

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Begins anew on the run's device; the weights stay as they are."""
        if self.device.type not in _DEVICES:
            raise ValueError(
                f"precision='fp16' runs on {' and '.join(_DEVICES)}, not on {self.device.type}. Pass device='cpu' or "
                "precision='fp32'."
            )
        self._scaler = LossScaler(self.device.type, **self._options)
        self.skipped_steps = 0
        return module

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Refuse optimizers that cannot be held back."""
        if needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} computes gradients itself, so precision='fp16' could not hold it back when "
                "they overflow. Pass precision='bf16' or 'fp32', or an optimizer such as SGD or AdamW."
            )
        return True

    # --- a batch

    def batch_start(self, state: State) -> None:
        """Nothing has overflowed yet, whatever an exception has left."""
        self._begin()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast to float16."""
        return torch.autocast(self.device.type, dtype=torch.float16)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in float32."""
        self._adapt()
        return self._scaler.scale(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide by the scale, and mark on the device whether a gradient is not finite."""
        self._scaler.unscale_(optimizer)
        return True

    def overflowed(self, all_reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> bool:
        """Whether any gradient of this step was not finite, on any rank. Raises FloatingPointError if none is at any scale."""
        flag = self._scaler.overflow
        if flag is None:
            return False
        flag.copy_(all_reduce(flag, "max"))
        self._skip = bool(flag.item())
        if self._skip and (scale := self._scaler.get_scale()) * self._scaler.get_backoff_factor() < self.min_scale:
            raise FloatingPointError(
                f"Gradients are not finite, nor were they in earlier batches, although the loss scale has fallen to {scale:g}: "
                "this is no overflow that scaling causes. Look for the layer with detect_anomaly=True, lower the learning "
                "rate, or use precision='bf16' or 'fp32'."
            )
        return self._skip

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], torch.Tensor]) -> bool:
        """Step, or return False if gradients overflowed."""
        self._decided = True
        return not self._skip and super().step_optimizer(optimizer, closure)

    def batch_end(self, state: State) -> None:
        """Adapt the scale, and log it, unless the batch was left out before gradients were there."""
        self._decided = self._scaler.overflow is not None
        if self._adapt():
            state.log(
                {"precision/loss_scale": self._scaler.scale_tensor, "precision/skipped_steps": self.skipped_steps}
            )

    def _adapt(self) -> bool:
        """Draw the consequences of a step that was taken or left out, if there was one since the last time."""
        if not self._decided:
            return False
        self.skipped_steps += self._skip
        self._scaler.update()
        self._begin()
        return True

    def _begin(self) -> None:
        self._scaler.begin()
        self._skip = self._decided = False

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The scale, how many steps in a row did not overflow, and how many did in all."""
        self._adapt()
        own = self._scaler.state_dict()
        return {
            "loss_scale": own["scale"], "good_steps": own["_growth_tracker"], "skipped_steps": self.skipped_steps,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`; factors and intervals stay those of the constructor."""
        if state_dict.keys() != (known := self.state_dict()).keys():
            raise ValueError(f"FP16's state has the keys {sorted(known)}, but was given {sorted(state_dict)}.")
        self._scaler.load_state_dict(
            {
                **self._scaler.state_dict(),
                "scale": state_dict["loss_scale"],
                "_growth_tracker": state_dict["good_steps"],
            }
        )
        self.skipped_steps = state_dict["skipped_steps"]
