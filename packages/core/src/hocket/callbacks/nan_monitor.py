"""Which tensors are not finite, by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hocket.callbacks.periodic import Periodic
from hocket.dtensors import mesh_of, non_finite, total_norm
from hocket.state import State


class NaNMonitor(Periodic):
    """Raises FloatingPointError naming the gradients that are not finite, and parameters and buffers if asked.

    Finer than the Trainer's ``nonfinite=``, which it comes before, and dearer: one reduction per tensor and batch. On a CPU
    the result is looked at in every batch; elsewhere it stays on the device and is looked at when ``every`` is due and when
    the fit ends, so that no batch waits. Gradients are looked at before clipping, parameters and buffers before the step.
    Not for precisions that scale the loss, unless ``gradients=False``: theirs are now and then infinite, and they skip these
    steps themselves.

    Args:
        every: how often to look, on devices other than the CPU.
        gradients, parameters, buffers: what to look at besides the loss.
    """

    def __init__(
        self, every: str = "10ba", gradients: bool = True, parameters: bool = False, buffers: bool = False
    ) -> None:
        super().__init__(every)
        self._gradients, self._parameters, self._buffers = gradients, parameters, buffers
        #: The largest absolute value of each tensor since the last look, and which tensors those are.
        self._worst: Tensor | None = None
        self._watched: list[tuple[str, str]] = []
        self._first_batch = 0
        self._named: list[tuple[str, nn.Parameter]] = []

    def fit_start(self, state: State) -> None:
        """Forgets what an interrupted fit has left."""
        super().fit_start(state)
        self._worst = None
        self._named = [(name, parameter) for name, parameter in state.model.named_parameters() if parameter.numel()]

    def after_train_batch(self, state: State) -> None:
        """Gradients are complete, unscaled and not yet clipped."""
        found = list(self._tensors(state))
        tensors = [tensor for *_, tensor in found]
        on_host = not state.device_kind.asynchronous
        if on_host and not non_finite(tensors).item():
            return
        worst = _largest(tensors)
        watched = [(kind, name) for kind, name, _ in found]
        if self._worst is not None and self._watched != watched:
            self._look(state)
        if self._worst is None:
            self._first_batch = state.timestamp.batch
        else:
            worst = torch.maximum(worst, self._worst)  # keeps NaN and infinity
        self._worst, self._watched = worst, watched
        if on_host:
            self._look(state)

    def fit_end(self, state: State) -> None:
        """Looks at what has been gathered since."""
        self._look(state)

    def _report(self, state: State) -> None:
        self._look(state)

    def _tensors(self, state: State) -> Iterator[tuple[str, str, Tensor]]:
        if state.loss is not None:
            yield "loss", "", state.loss
        if self._parameters:
            yield from (("parameters", name, parameter.detach()) for name, parameter in self._named)
        if self._buffers:
            floating = ((n, b) for n, b in state.model.named_buffers() if b.is_floating_point() or b.is_complex())
            yield from (("buffers", n, b) for n, b in floating if b.numel())
        if self._gradients:
            yield from (("gradients", name, p.grad) for name, p in self._named if p.grad is not None)

    def _look(self, state: State) -> None:
        worst, self._worst = self._worst, None
        if worst is None:
            return
        finite = torch.isfinite(worst).tolist()
        if all(finite):
            return
        bad: dict[str, list[str]] = {}
        for (kind, name), is_finite in zip(self._watched, finite, strict=True):
            if not is_finite:
                bad.setdefault(kind, []).append(name)
        total = {kind: sum(each == kind for each, _ in self._watched) for kind in bad}
        what = [
            f"{_some(names)} ({len(names)} of {total[kind]} {kind})" for kind, names in bad.items() if kind != "loss"
        ]
        if "loss" in bad:
            what.insert(0, "the loss")
        first, last = self._first_batch, max(state.timestamp.batch - state.device_kind.asynchronous, self._first_batch)
        where = f"in batch {first}" if first == last else f"in one of the batches {first} to {last}"
        raise FloatingPointError(f"Not finite {where}: {'; '.join(what)}. {_advice(bad)}")


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value of each tensor, NaN if it has one, as a vector."""
    if any(mesh_of(tensor) is not None for tensor in tensors):
        norms = [total_norm([tensor], float("inf")) for tensor in tensors]
    else:
        norms = list(torch._foreach_norm(tensors, float("inf")))
    first = norms[0]
    if all(norm.dtype is first.dtype and norm.device == first.device for norm in norms):
        return torch.stack(norms)
    # float32 would make infinities of what float64 can hold.
    wide = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    return torch.stack([norm.to(first.device, wide) for norm in norms])


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
