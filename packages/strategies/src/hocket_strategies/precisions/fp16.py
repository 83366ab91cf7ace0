"""float16 autocast with dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket import Precision
from hocket.errors import NotFinite, WrongValue
from hocket.optim.closures import needs_closure
from hocket_strategies.precisions.loss_scaling import LossScaler

if TYPE_CHECKING:
    from hocket.state.state import State

_DEVICES = ("cpu", "cuda")


class FP16(Precision):
    """Compute forward and loss under float16 autocast with dynamic loss scaling; weights stay in 32 bits.

    Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), using `torch.amp.GradScaler`: the scale
    falls when gradients overflow and grows after ``growth_interval`` steps without overflow. If gradients overflow, no
    optimizer steps on any rank, and schedules do not advance. The Trainer's ``nonfinite=`` does not apply to such
    overflows; it does apply to a non-finite loss.

    Logs ``precision/loss_scale``, the scale of the next batch, and ``precision/skipped_steps``, the number so far.
    The host decides whether to step, so it waits for the device once per computed gradient.

    Args:
        init_scale: the initial scale.
        growth_factor: factor by which it grows; more than 1.
        backoff_factor: factor by which it falls; between 0 and 1.
        growth_interval: number of consecutive steps without overflow after which it grows.
        min_scale: an overflow that lowers the scale below this has another cause and raises FloatingPointError.

    Raises:
        ValueError: an argument is out of range; later, for a device other than cpu and cuda, or an optimizer such as LBFGS
            whose steps cannot be skipped because it computes gradients itself.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> precision = hocket_strategies.FP16(growth_interval=500)  # or precision="fp16"
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision=precision, device="cpu")
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
            raise WrongValue(
                f"FP16 was given «init_scale={init_scale}» and «min_scale={min_scale}»: give positive numbers, the first at "
                "least as large as the second, such as 65536.0 and 2**-14."
            )
        if not growth_factor > 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise WrongValue(
                f"FP16 was given «growth_factor={growth_factor}», «backoff_factor={backoff_factor}» and "
                f"«growth_interval={growth_interval}»: the first is more than 1, the second between 0 and 1, the third at "
                "least 1, such as 2.0, 0.5 and 2000."
            )
        self._options: dict[str, Any] = {
            "init_scale": float(init_scale),
            "growth_factor": float(growth_factor),
            "backoff_factor": float(backoff_factor),
            "growth_interval": growth_interval,
        }
        self.min_scale = min_scale
        #: The scale of each named step ("" for a step of all optimizers), and the scale of the current step.
        self._scales: dict[str, _Scale] = {}
        self._begin_with("cpu")

    # --- before training

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Start with a new scale on the run's device; the weights are not converted."""
        if self.device.type not in _DEVICES:
            raise WrongValue(
                f"«precision='fp16'» runs on {' and '.join(_DEVICES)}, not on {self.device.type}. Pass «device='cpu'» or "
                "precision='fp32'."
            )
        self._begin_with(self.device.type)
        return module

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Refuse optimizers whose steps cannot be skipped."""
        if needs_closure(optimizer):
            raise WrongValue(
                f"{type(optimizer).__name__} computes gradients itself, so «precision='fp16'» could not skip its step when "
                "they overflow. Pass «precision='bf16'» or 'fp32', or an optimizer such as SGD or AdamW."
            )
        return True

    # --- a batch

    def batch_start(self, state: State) -> None:
        """Reset the overflow state, which an exception may have left behind."""
        for scale in self._scales.values():
            scale.begin()
        self._current = self._scales[""]

    def begin_step(self, name: str) -> bool:
        """Select the scale of this step."""
        if name not in self._scales:
            self._scales[name] = _Scale(self.device.type, self._options)
        self._current = self._scales[name]
        self._current.end_step()
        return True

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast to float16."""
        return torch.autocast(self.device.type, dtype=torch.float16)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in float32."""
        self._current.adapt()
        return self._current.scaler.scale(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide by the scale, and record non-finite gradients on the device."""
        self._current.scaler.unscale_(optimizer)
        return True

    def overflowed(self, all_reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> bool:
        """Whether any gradient of this step was non-finite on any rank. Raises FloatingPointError if so at every scale."""
        current = self._current
        flag = current.scaler.overflow
        if flag is None:
            return False
        flag.copy_(all_reduce(flag, "max"))
        current.skip = bool(flag.item())
        current.decided |= current.skip  # no optimizer may be asked to step any more
        scaler = current.scaler
        if current.skip and (scale := scaler.get_scale()) * scaler.get_backoff_factor() < self.min_scale:
            raise NotFinite(
                f"Gradients are not finite, nor were they in earlier batches, although the loss scale has fallen to {scale:g}: "
                "the cause is not loss scaling. Find the layer with «detect_anomaly=True», lower the learning "
                "rate, or use «precision='bf16'» or 'fp32'."
            )
        return current.skip

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], torch.Tensor]) -> bool:
        """Step, or return False if gradients overflowed."""
        self._current.decided = True
        return not self._current.skip and super().step_optimizer(optimizer, closure)

    def batch_end(self, state: State) -> None:
        """Adapt the scales, and log them, unless the batch was skipped before gradients were computed."""
        for name, scale in self._scales.items():
            if scale.end_step():
                prefix = f"precision/{name}" if name else "precision"
                state.log(
                    {f"{prefix}/loss_scale": scale.scaler.scale_tensor, f"{prefix}/skipped_steps": scale.skipped_steps}
                )

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because their gradients overflowed."""
        return sum(scale.skipped_steps for scale in self._scales.values())

    def _begin_with(self, device: str) -> None:
        self._current = _Scale(device, self._options)
        self._scales = {"": self._current}

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the consecutive steps without overflow, and all skipped steps; also for each named step."""
        own = self._scales[""].state_dict()
        named = {name: scale.state_dict() for name, scale in self._scales.items() if name}
        return {**own, "steps": named} if named else own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; factors and intervals stay those of the constructor."""
        known = self._scales[""].state_dict()
        if state_dict.keys() - {"steps"} != known.keys():
            raise WrongValue(f"FP16's state has the keys {sorted(known)}, but was given {sorted(state_dict)}.")
        for name, own in {"": state_dict, **state_dict.get("steps", {})}.items():
            self.begin_step(name)
            self._current.load_state_dict(own)
        self._current = self._scales[""]


class _Scale:
    """A loss scale, and the outcome of the latest step that used it."""

    def __init__(self, device: str, options: Mapping[str, Any]) -> None:
        self.scaler = LossScaler(device, **options)
        self.skip = False
        #: Whether a step was taken or skipped that the scale has not been adapted to yet.
        self.decided = False
        self.skipped_steps = 0

    def end_step(self) -> bool:
        """Adapt to the latest step if its gradients were computed, taken or not."""
        self.decided = self.scaler.overflow is not None
        return self.adapt()

    def adapt(self) -> bool:
        """Adapt to a step that was taken or skipped since the last call, if any."""
        if not self.decided:
            return False
        self.skipped_steps += self.skip
        self.scaler.update()
        self.begin()
        return True

    def begin(self) -> None:
        """Begin a new step, whatever the outcome of the last one."""
        self.scaler.begin()
        self.skip = self.decided = False

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the consecutive steps without overflow, and the skipped steps."""
        self.adapt()
        own = self.scaler.state_dict()
        return {
            "loss_scale": own["scale"], "good_steps": own["_growth_tracker"], "skipped_steps": self.skipped_steps,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        own = {"scale": state_dict["loss_scale"], "_growth_tracker": state_dict["good_steps"]}
        self.scaler.load_state_dict({**self.scaler.state_dict(), **own})
        self.skipped_steps = state_dict["skipped_steps"]
