"""Detection of non-finite tensors, by name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from hocket.basics.dtensors import non_finite
from hocket.basics.time import batches
from hocket.errors import NotFinite
from hocket.hookspecs.callback import Callback
from hocket.state.state import State


class NaNMonitor(Callback):
    """Raise FloatingPointError naming non-finite gradients, and optionally non-finite parameters and buffers.

    It runs before the Trainer's ``nonfinite=`` in every hundredth batch, and raises also with ``"skip"`` and ``"warn"``. When
    ``nonfinite="raise"`` ends a fit in another batch, it adds the names as a note to that error. Non-finite values persist,
    since one non-finite gradient makes a weight, and then all losses, non-finite. A check reads all gradients and waits for
    the device. To find the first non-finite gradient at that cost, write ``{"nan-monitor": {"every": 1}}``.

    Gradients are checked before clipping, parameters and buffers before the step. Do not use it with precisions that scale
    the loss, unless ``gradients=False``: their gradients overflow occasionally, and they skip these steps themselves.

    Args:
        every: number of batches between checks; best the Trainer's ``log_every``, when the host waits for the device anyway.
        gradients, parameters, buffers: the tensors to check besides the loss. After a finding all parameters are checked,
            to report whether an earlier step caused it.

    Raises:
        ValueError: ``every`` is not a positive int.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.nan_monitor import NaNMonitor
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=[NaNMonitor(every=1, parameters=True)], device="cpu")
    """

    def __init__(
        self, every: int = 100, gradients: bool = True, parameters: bool = False, buffers: bool = False
    ) -> None:
        self.every_batches = {"after_train_batch": batches(every)}
        self._gradients, self._parameters, self._buffers = gradients, parameters, buffers
        self._named: list[tuple[str, nn.Parameter]] = []
        #: The error that a check raised.
        self._found: FloatingPointError | None = None

    def fit_start(self, state: State) -> None:
        """Collect the parameters by name, since algorithms may have changed the model."""
        self._named = [(name, parameter) for name, parameter in state.model.named_parameters() if parameter.numel()]

    def after_train_batch(self, state: State) -> None:
        """Check the gradients, which are complete, unscaled and not yet clipped."""
        if state.loss is None:
            return
        checked = self._tensors(state, self._parameters).values()
        if non_finite([tensor for tensors in checked for _, tensor in tensors]).item():
            self._found = NotFinite(_message(state, self._tensors(state, True)))
            raise self._found

    def exception(self, state: State) -> None:
        """Add the names to the error of ``nonfinite="raise"``."""
        error, found = state.exception, self._found
        self._found = None
        if isinstance(error, FloatingPointError) and error is not found and state.loss is not None:
            tensors = self._tensors(state, True)
            if any(map(_bad, tensors.values())):
                error.add_note(_message(state, tensors))

    def _tensors(self, state: State, parameters: bool) -> dict[str, list[tuple[str, Tensor]]]:
        """Return the tensors to check, by kind and name."""
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


def _message(state: State, found: dict[str, list[tuple[str, Tensor]]]) -> str:
    bad = {kind: names for kind, tensors in found.items() if (names := _bad(tensors))}
    if "parameters" in bad:
        bad.pop("gradients", None)  # a consequence of the parameters
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
        return "An earlier step made them non-finite. Lower the learning rate or clip gradients."
    if "loss" in bad:
        return "Check the batch and the inputs of the loss; detect_anomaly=True finds the operation."
    last = bad["gradients"][-1]
    return (
        f"The loss is finite, so the cause is in the backward pass, which runs from the last layer to the first. Check the "
        f"inputs of '{last}', or find the operation with detect_anomaly=True."
    )
