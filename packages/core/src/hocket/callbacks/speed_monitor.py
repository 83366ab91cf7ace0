"""Throughput."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hocket import hookimpl
from hocket.callbacks.periodic import Periodic
from hocket.state import State
from hocket.time import Timestamp


class SpeedMonitor(Periodic):
    """Logs samples, tokens and batches per second of training, over all ranks; and MFU where it can be known.

    ``speed/samples_per_second``, ``speed/tokens_per_second`` (for batches that count tokens), ``speed/batches_per_second``,
    ``speed/mfu``. Time spent on evaluation does not count. Never waits for the device: on one that computes ahead of the host,
    figures over a few batches are the host's.

    MFU, model FLOPs utilisation, is the floating-point operations that the model needs, per second, over what all devices
    could do at best (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Args:
        every: over how long each figure is taken, such as ``"50ba"``.
        flops_per_sample: floating-point operations of forward and backward for one sample; about ``6 * parameters *
            tokens`` for a transformer. Where it differs between batches, a function of the batch, which is given this rank's
            batch as the loader made it; the batches of other ranks are taken to be alike.
        peak_flops: per second of one device; None for what the device's kind knows of itself.

    Raises:
        TypeError: ``flops_per_sample`` is neither a number nor a function.

    Example:
        >>> import hocket, torch
        >>> from hocket.callbacks.speed_monitor import SpeedMonitor
        >>> model = torch.nn.Linear(512, 512)
        >>> flops = 6 * sum(parameter.numel() for parameter in model.parameters())
        >>> monitor = SpeedMonitor(every="50ba", flops_per_sample=flops)
        >>> trainer = hocket.Trainer(model=model, callbacks=[monitor], loggers=["jsonl"], device="cpu")
    """

    def __init__(
        self,
        every: str = "10ba",
        flops_per_sample: float | Callable[[Any], float] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__(every)
        if not (flops_per_sample is None or isinstance(flops_per_sample, int | float) or callable(flops_per_sample)):
            raise TypeError(
                f"flops_per_sample={flops_per_sample!r} is {type(flops_per_sample).__name__}; give a number such as 6e9, or "
                "a function of a batch that returns one."
            )
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self._since = Timestamp()
        self._flops = self._each = 0.0
        #: What one device can do at best, if MFU is wanted and that is known.
        self._peak: float | None = None

    def fit_start(self, state: State) -> None:
        """Figures begin anew."""
        super().fit_start(state)
        self._since, self._flops, self._each, self._peak = state.timestamp.copy(), 0.0, 0.0, None
        if self._flops_per_sample is not None:
            dtype = state.precision.compute_dtype
            self._peak = self._peak_flops or state.device_kind.peak_flops(dtype)
            if self._peak is None:
                warnings.warn(
                    f"SpeedMonitor cannot log speed/mfu: what {state.device.type} does at best in {dtype} is not known. Pass "
                    "peak_flops=, in operations per second of one device.",
                    stacklevel=2,
                )

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state: State) -> None:
        """Looks at the batch as the loader made it, before algorithms change it."""
        if self._peak is not None and self._flops_per_sample is not None:
            given = self._flops_per_sample
            self._each = given(state.batch) if callable(given) else given

    def batch_end(self, state: State) -> None:
        """Counts, and logs when it is due."""
        self._flops += self._each * state.batch_samples
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
