"""The guard against losses and gradients that are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch

from hocket.distributed.dtensors import local, non_finite, total_norm
from hocket.state import State

Policy = Literal["raise", "skip", "warn"]


class NonFiniteGuard:
    """Decides after the gradients of a batch are there whether the optimizer may step.

    The loss is always looked at, the gradients' norm where clipping computed it, and under ``"skip"`` every gradient. Else
    gradients are looked at when a fit ends; before that, weights that they spoilt spoil the next loss. On a CPU that
    happens at once. On other devices looking would make the host wait in every step, so ``"raise"`` and ``"warn"`` only note
    it on the device and speak at the end of the logging interval; ``"skip"`` waits.

    No checkpoint is written before the guard has looked at everything noted, and at the weights.

    All ranks decide alike: the loss is that of the global batch and the gradients are reduced.

    Gradients that overflowed only because a precision scales the loss are left to it: the step is left out, whatever the
    policy, and nothing is said. The loss is not scaled, so it is looked at all the same.

    Args:
        asynchronous: whether the device is; see `hocket.Device`.
    """

    def __init__(self, policy: Policy, asynchronous: bool) -> None:
        self._policy = policy
        self._at_once = not asynchronous or policy == "skip"
        self._noted: torch.Tensor | None = None
        #: Whether the latest gradients are the precision's affair.
        self._overflowed = False
        #: Batches that were not trained on.
        self.skipped = 0

    def allows(self, state: State) -> bool:
        """Whether the optimizer may step. Raises FloatingPointError under ``"raise"``."""
        try:
            self._overflowed = state.bus.overflowed(state.bus.all_reduce)
        except FloatingPointError as error:
            error.add_note(f"That was in batch {state.timestamp.batch}.")
            raise
        may_step = not self._overflowed
        loss, norm = state.loss, state.gradient_norm if may_step else None
        assert loss is not None
        if not self._at_once:
            bad = ~torch.isfinite(loss) if norm is None else ~(torch.isfinite(loss) & torch.isfinite(norm))
            self._noted = bad if self._noted is None else self._noted | bad
            return may_step
        finite = math.isfinite(loss.item()) and (norm is None or math.isfinite(norm.item()))
        if finite and may_step and self._policy == "skip" and norm is None:
            finite = _gradients_finite(state)
        if finite:
            return may_step
        where = f"batch {state.timestamp.batch}"
        if state.timestamp.batch and not _weights_finite(state):
            where = f"the weights before {where}, which were stepped with non-finite gradients of an earlier batch,"
        self._speak(state, where)
        return may_step and self._policy != "skip"

    def interval_end(self, state: State) -> None:
        """Look at what was noted on the device."""
        noted, self._noted = self._noted, None
        if noted is not None and noted.item():
            self._speak(state, f"a batch before {state.timestamp.batch}, within the last logging interval")

    def fit_end(self, state: State) -> None:
        """Look at the gradients of the last batch, which no loss comes after."""
        if self._overflowed or self._policy == "skip" or state.loss is None or not math.isfinite(state.loss.item()):
            return
        if not _gradients_finite(state):
            self._speak(
                state, f"the gradients of batch {state.timestamp.batch - 1}, which the optimizer has stepped with,"
            )

    def before_checkpoint(self, state: State) -> bool:
        """Whether the weights are worth keeping: what was noted is looked at, and they are finite on every rank.

        Waits for the device, as the checkpoint is about to. Every rank has to call it.

        Raises FloatingPointError under ``"raise"``; otherwise warns.
        """
        self.interval_end(state)
        if _weights_finite(state):
            return True
        message = (
            f"The weights are not finite after batch {state.timestamp.batch}, so no checkpoint is written; the earlier ones "
            "stay. Resume from the latest of them with a lower learning rate or clip_gradients=1.0."
        )
        if self._policy == "raise":
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False

    def state_dict(self) -> dict[str, Any]:
        """What was skipped, and what was noted and not yet looked at."""
        return {"skipped": self.skipped, "noted": self._noted, "overflowed": self._overflowed}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.skipped, self._noted, self._overflowed = tree["skipped"], tree["noted"], tree["overflowed"]

    def _speak(self, state: State, where: str) -> None:
        loss = "unknown" if state.loss is None else f"{state.loss.item():g}"
        norm = "" if state.gradient_norm is None else f", its gradient norm {state.gradient_norm.item():g}"
        place = f"epoch {state.timestamp.epoch}, batch {state.timestamp.batch_in_epoch} in it"
        where = f"{where} ({place}{f', step {state.step.name!r}' if state.step.name else ''})"
        if self._policy == "raise":
            raise FloatingPointError(
                f"The loss or a gradient is not finite in {where}: the latest loss is {loss}{norm}. Lower the learning "
                "rate, clip gradients (clip_gradients=1.0), look for the layer with callbacks=[{'nan-monitor': {'every': "
                "1}}] or detect_anomaly=True, or go on with nonfinite='skip' or nonfinite='warn'."
            )
        left_out = self._policy == "skip" or self._overflowed
        done = "it is not trained on" if left_out else "training goes on with it"
        self.skipped += self._policy == "skip"
        warnings.warn(f"Not finite in {where}: loss {loss}{norm}; {done}.", RuntimeWarning, stacklevel=2)


def _gradients_finite(state: State) -> bool:
    gradients = [parameter.grad for parameter in state.trained_parameters() if parameter.grad is not None]
    return not non_finite(gradients).item()


def _weights_finite(state: State) -> bool:
    """Whether they are on every rank, each of which has to call this: not every strategy keeps the same everywhere."""
    shards = (local(each.detach()) for each in state.trained_parameters() if each.is_floating_point())
    weights = [each for each in shards if each.numel()]
    if all(each.is_cpu for each in weights):  # where this runs at the memory's speed, and norms at a tenth of it
        finite = all(math.isfinite(extreme.item()) for each in weights for extreme in each.aminmax())
    else:
        finite = bool(torch.isfinite(total_norm(weights, math.inf)).item())
    if state.strategy.world_size > 1:
        finite = bool(state.bus.all_reduce(torch.tensor(int(finite)), "min").item())
    return finite
