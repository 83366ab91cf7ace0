"""The losses and gradient norms of the batches that `LossSpikeGuard` judges; reading them does not stop the device."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.dtensors import total_norm

if TYPE_CHECKING:
    from hocket.state.state import State


class MeasuredBatch:
    """A batch: where it is, the indices of its samples on this rank or None, and its values by name and step."""

    def __init__(self, at: dict[str, int], indices: list[Any] | None, values: dict[str, dict[str, float]]) -> None:
        self.at, self.indices = at, indices
        #: The values of the steps that were taken by name, numbers or lists of `_Values` for the parts of the batch.
        self.values: dict[str, Any] = dict(values)
        #: By name of the step, and number of the part of the batch: what was measured, and the spikes.
        self._measured: dict[tuple[str, int], _Values] = {}
        self.spikes: dict[tuple[str, int], dict[str, float]] = {}

    @classmethod
    def of(cls, state: State, loaded: Sequence[list[Any] | None]) -> MeasuredBatch:
        """Return the batch that is about to be trained on."""
        now = state.timestamp
        at = {"batch": now.batch, "epoch": now.epoch, "batch_in_epoch": now.batch_in_epoch}
        return cls(at, joined(loaded), {})

    def measure(self, state: State, gradient_norm: bool) -> None:
        """Keep the loss and gradient norm of a step, unless it is measured already: SAM computes gradients twice."""
        key = state.step.name, state.step.part
        if state.loss is None or key in self._measured:
            return
        values = [state.loss.detach().float()]
        if gradient_norm:
            gradients = [each.grad for each in state.trained_parameters() if each.grad is not None]
            values.append(total_norm(gradients).float().to(values[0].device))
        self._measured[key] = _Values(torch.stack(values))

    def add(self, name: str, part: int, alone: bool) -> None:
        """Add what was measured of a step, which is about to be taken, to the values; ``alone``: in place of earlier parts."""
        if (measured := self._measured.get((name, part))) is not None:
            self.values[name] = [measured] if alone else [*self.values.get(name, ()), measured]

    def read(self, step: str | None = None) -> dict[str, float]:
        """Return the values of a step or of all by name, the largest of their parts, or NaN. Waits for the device."""
        for name, values in self.values.items():
            if isinstance(values, list):
                parts = zip(*(part.read() for part in values), strict=True)
                largest = (math.nan if any(map(math.isnan, part)) else max(part) for part in parts)
                self.values[name] = dict(zip(("loss", "gradient_norm"), largest, strict=False))
        return {
            f"{name}/{what}" if name else what: value
            for name, values in self.values.items()
            if step is None or name == step
            for what, value in values.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments that make this batch."""
        self.read()
        return {"at": dict(self.at), "indices": self.indices, "values": dict(self.values)}


class _Values:
    """Values on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:  # the copy follows the work queued so far, and does not wait for what is queued later
            self._values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._values.tolist()
        return found


def joined(indices: Sequence[list[Any] | None]) -> list[Any] | None:
    """Return all indices in one list, each once, or None if some are unknown. Indices that are no integers become text."""
    joined: list[Any] = []
    for each in indices:
        if each is None:
            return None
        for index in each:
            try:
                joined.append(operator.index(index))
            except TypeError:
                joined.append(str(index))
    return list(dict.fromkeys(joined)) or None  # a rank without a slice computes on a sample of another one
