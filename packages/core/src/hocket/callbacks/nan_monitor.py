"""Which tensors are not finite, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from hocket.callback import Callback
from hocket.distributed.dtensors import non_finite
from hocket.state import State
from hocket.time import batches


class NaNMonitor(Callback):
    """Raises FloatingPointError naming what is not finite: gradients, and parameters and buffers if asked.

    Finer than the Trainer's ``nonfinite=``, which it comes before. Looks at every tenth batch, and at any whose loss is not
    finite: what is so once stays so, for a bad gradient spoils a weight and that all losses. A look reads all gradients, and
    waits for the device; where that does not count, as in search of the first bad gradient, write
    ``{"nan-monitor": {"every": 1}}``. On devices other than the CPU no loss is looked at in between.

    Gradients are looked at before clipping, parameters and buffers before the step. Not for precisions that scale the loss,
    unless ``gradients=False``: theirs are now and then infinite, and they skip these steps themselves.

    Args:
        every: look at every so many batches; best the Trainer's ``log_every``, when all wait for the device anyway.
        gradients, parameters, buffers: what to look at besides the loss. When something was found, all parameters are
            looked at, for they say whether it began before.

    Raises:
        ValueError: ``every`` is not a positive int.

    Example:
        >>> import hocket, torch
        >>> from hocket.callbacks.nan_monitor import NaNMonitor
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=[NaNMonitor(every=1, parameters=True)], device="cpu")
    """

    def __init__(
        self, every: int = 10, gradients: bool = True, parameters: bool = False, buffers: bool = False
    ) -> None:
        self._every = batches(every)
        self._gradients, self._parameters, self._buffers = gradients, parameters, buffers
        self._named: list[tuple[str, nn.Parameter]] = []

    def fit_start(self, state: State) -> None:
        """Algorithms may have changed the model."""
        self._named = [(name, parameter) for name, parameter in state.model.named_parameters() if parameter.numel()]

    def after_train_batch(self, state: State) -> None:
        """Gradients are complete, unscaled and not yet clipped."""
        if state.loss is None:
            return
        bad = not state.device_kind.asynchronous and not math.isfinite(state.loss.item())
        if not bad and (state.timestamp.batch + 1) % self._every:
            return
        looked_at = self._tensors(state, self._parameters).values()
        if bad or non_finite([tensor for tensors in looked_at for _, tensor in tensors]).item():
            raise FloatingPointError(_complaint(state, self._tensors(state, True)))

    def _tensors(self, state: State, parameters: bool) -> dict[str, list[tuple[str, Tensor]]]:
        """What is looked at, by kind and name."""
        assert state.loss is not None
        found = {"loss": [("", state.loss)]}
        if self._buffers:
            floating = ((n, b) for n, b in state.model.named_buffers() if b.is_floating_point() or b.is_complex())
            found["buffers"] = [(n, b) for n, b in floating if b.numel()]
        if parameters:
            found["parameters"] = [(name, p.detach()) for name, p in self._named]
        if self._gradients:
            found["gradients"] = [(name, p.grad) for name, p in self._named if p.grad is not None]
        return found


def _complaint(state: State, found: dict[str, list[tuple[str, Tensor]]]) -> str:
    bad = {kind: names for kind, tensors in found.items() if (names := _bad(tensors))}
    if "parameters" in bad:
        bad.pop("gradients", None)  # they follow from these
    what = [
        "the loss" if kind == "loss" else f"{_some(names)} ({len(names)} of {len(found[kind])} {kind})"
        for kind, names in bad.items()
    ]
    return f"Not finite in batch {state.timestamp.batch}: {'; '.join(what)}. {_advice(bad)}"


def _bad(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if non_finite([tensor]).item()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _advice(bad: dict[str, list[str]]) -> str:
    if "parameters" in bad or "buffers" in bad:
        return "These were so before the step: an earlier one spoilt them. Lower the learning rate or clip gradients."
    if "loss" in bad:
        return "Look at the batch and at what the loss is given; detect_anomaly=True finds the operation."
    last = bad["gradients"][-1]
    return (
        f"The loss is finite, so this begins in the backward pass, which goes from the last layer to the first: look at what "
        f"'{last}' is given, or find the operation with detect_anomaly=True."
    )
