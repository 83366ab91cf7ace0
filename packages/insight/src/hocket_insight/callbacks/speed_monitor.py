"""Logging of throughput."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket import hookimpl
from hocket.basics.timestamp import Timestamp
from hocket.errors import WrongType
from hocket.help import warn
from hocket.state.periodic import Periodic
from hocket.state.state import State


class SpeedMonitor(Periodic):
    """Log samples, tokens and batches per second of training, over all ranks, and MFU if its inputs are known.

    The names are ``speed/samples_per_second``, ``speed/tokens_per_second`` (for batches with token counts),
    ``speed/batches_per_second`` and ``speed/mfu``. Evaluation time is excluded. The monitor never waits for the device: on an
    asynchronous device, values over a few batches are the speed of the host.

    MFU, model FLOPs utilization, is the rate of floating-point operations that the model needs, divided by the peak rate of
    all devices (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Args:
        every: the interval that each value is measured over, such as ``"50ba"``.
        flops_per_sample: floating-point operations of forward and backward for one sample; about ``6 * parameters *
            tokens`` for a transformer. If it differs between batches, pass a function of the batch. The function receives this
            rank's batch as loaded; the batches of other ranks are assumed to need the same.
        peak_flops: peak floating-point operations per second of one device; None for the known peak of the device kind.

    Raises:
        TypeError: ``flops_per_sample`` is neither a number nor a function.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.speed_monitor import SpeedMonitor
        >>> model = torch.nn.Linear(512, 512)
        >>> flops = 6 * sum(parameter.numel() for parameter in model.parameters())
        >>> monitor = SpeedMonitor(every="50ba", flops_per_sample=flops)
        >>> trainer = hocket.Trainer(model=model, callbacks=[monitor], loggers=["jsonl"], device="cpu")
    """

    def __init__(
        self,
        every: str = "50ba",
        flops_per_sample: float | Callable[[Any], float] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._flops_per_sample = flops_per_sample
        super().__init__(every)
        if flops_per_sample is None and type(self).after_dataloader is SpeedMonitor.after_dataloader:
            self.every_batches = {**self.every_batches, "after_dataloader": 0}
        if not (flops_per_sample is None or isinstance(flops_per_sample, int | float) or callable(flops_per_sample)):
            raise WrongType(
                f"«flops_per_sample={flops_per_sample!r}» is {type(flops_per_sample).__name__}; give a number such as 6e9, or "
                "a function of a batch that returns one."
            )
        self._peak_flops = peak_flops
        self._since = Timestamp()
        self._flops = 0.0
        #: Operations per sample, of each batch of the data that the current batch has; see ``accumulate``.
        self._each: list[float] = []
        #: The peak of one device if MFU is logged, else None.
        self._peak: float | None = None

    def _in_every_batch(self) -> bool:
        return self._flops_per_sample is not None or type(self).batch_end is not SpeedMonitor.batch_end

    def fit_start(self, state: State) -> None:
        """Restart the measurement."""
        super().fit_start(state)
        self._since, self._flops, self._each, self._peak = state.timestamp.copy(), 0.0, [], None
        if self._flops_per_sample is not None:
            dtype = state.precision.compute_dtype
            self._peak = self._peak_flops or state.device_kind.peak_flops(dtype)
            if self._peak is None:
                warn(
                    f"SpeedMonitor cannot log speed/mfu: the peak of {state.device.type} in {dtype} is not known. Pass "
                    "peak_flops=, in operations per second of one device."
                )

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state: State) -> None:
        """Compute the operations per sample from the batch as loaded, before algorithms change it."""
        if self._peak is not None and self._flops_per_sample is not None:
            given = self._flops_per_sample
            self._each.append(given(state.batch) if callable(given) else given)

    def batch_end(self, state: State) -> None:
        """Count the batch, and log if the interval is due."""
        if self._each:
            self._flops += sum(self._each) / len(self._each) * state.batch_samples
            self._each = []
        super().batch_end(state)

    def _report(self, state: State) -> None:
        now, since, flops = state.timestamp, self._since, self._flops
        seconds = now.seconds - since.seconds
        self._since, self._flops = now.copy(), 0.0
        if seconds <= 0:
            return
        values = {
            "speed/samples_per_second": (now.sample - since.sample) / seconds,
            "speed/batches_per_second": (now.batch - since.batch) / seconds,
        }
        if now.token > since.token:
            values["speed/tokens_per_second"] = (now.token - since.token) / seconds
        if self._peak is not None:
            values["speed/mfu"] = flops / seconds / (self._peak * state.strategy.world_size)
        state.log(values)
