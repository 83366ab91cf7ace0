"""The guard against non-finite losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from hocket.basics.dtensors import local, non_finite, total_norm
from hocket.basics.sparse_quantized import dense_values
from hocket.errors import NotFinite
from hocket.help import warn
from hocket.state.state import State

Policy = Literal["raise", "skip", "warn"]


class NonFiniteGuard:
    """Decide, once the gradients of a batch are computed, whether the optimizer may step.

    The guard checks the loss in every step, the gradient norm if clipping computed it, and under ``"skip"`` every gradient.
    Under other policies gradients are checked at the end of a fit; before that, non-finite gradients make the weights and so
    the next loss non-finite. On a CPU the guard reports at once. On other devices a check would make the host wait in every
    step: ``"raise"`` and ``"warn"`` record the result on the device and report at the end of the logging interval; ``"skip"``
    waits.

    Before a checkpoint is written, the guard checks everything that was recorded, and the weights.

    All ranks come to the same decision: the loss is that of the global batch and the gradients are reduced.

    The policy does not apply to gradients that overflowed only because of loss scaling: the precision skips that step without
    a warning. The loss itself is not scaled, so it is checked in these steps too.

    Args:
        asynchronous: whether the device computes asynchronously; see `hocket.Device`.
    """

    #: For messages: what is skipped, how often recorded checks are reported, and what else to try.
    unit, interval = "batch", "logging interval"
    hints = (
        "clip gradients («clip_gradients=1.0»), look for the layer with «callbacks=[{'nan-monitor': {'every': 1}}]» or "
        "«detect_anomaly=True»"
    )

    def __init__(self, policy: Policy, asynchronous: bool) -> None:
        self._policy = policy
        self._at_once = not asynchronous or policy == "skip"
        #: 0 on the device, or NaN once something was not finite.
        self._recorded: torch.Tensor | None = None
        #: Whether loss scaling made the latest gradients overflow.
        self._overflowed = False
        #: Number of skipped batches, or steps.
        self.skipped = 0
        #: How often this process found something, and at which of these times it warned last.
        self._found = self._told = 0

    def allows(self, state: State) -> bool:
        """Whether the optimizer may step. Raises FloatingPointError under ``"raise"``."""
        try:
            self._overflowed = state.bus.overflowed(state.bus.all_reduce)
        except FloatingPointError as error:
            error.add_note(f"That was in {self.unit} {state.timestamp.batch}.")
            raise
        may_step = not self._overflowed
        loss, norm = state.loss, state.gradient_norm if may_step else None
        assert loss is not None
        if not self._at_once:
            # One kernel each: 0 times a finite value is 0, 0 times another is NaN, and so is every sum with it.
            recorded = loss * 0 if self._recorded is None else torch.add(self._recorded, loss, alpha=0)
            self._recorded = (recorded if norm is None else torch.add(recorded, norm, alpha=0)).detach()
            return may_step
        finite = math.isfinite(loss.item()) and (norm is None or math.isfinite(norm.item()))
        if finite and may_step and self._policy == "skip" and norm is None:
            finite = _gradients_finite(state)
        if finite:
            return may_step
        where = f"{self.unit} {state.timestamp.batch}"
        if state.timestamp.batch and not _weights_finite(state):
            where = (
                f"the weights before {where}, which were stepped with non-finite gradients of an earlier {self.unit},"
            )
        self._report(state, where)
        return may_step and self._policy != "skip"

    def interval_end(self, state: State) -> None:
        """Report the checks that were recorded on the device."""
        noted, self._recorded = self._recorded, None
        if noted is not None and not math.isfinite(noted.item()):
            self._report(state, f"a {self.unit} before {state.timestamp.batch}, within the last {self.interval}")

    def fit_end(self, state: State) -> None:
        """Check the gradients of the last batch, because there is no later loss that would show them."""
        unchecked = not self._overflowed and self._policy != "skip"
        finite_loss = state.loss is not None and math.isfinite(state.loss.item())
        if unchecked and finite_loss and not _gradients_finite(state):
            self._report(
                state, f"the gradients of batch {state.timestamp.batch - 1}, which the optimizer has stepped with,"
            )
        if self._found > self._told:
            self._told = self._found
            warn(f"A loss or gradient was not finite {self._found} times.", RuntimeWarning)

    def before_checkpoint(self, state: State) -> bool:
        """Whether the weights are finite on every rank; recorded checks are reported first.

        Waits for the device, as saving does anyway. Every rank has to call it.

        Raises FloatingPointError under ``"raise"``; otherwise warns.
        """
        self.interval_end(state)
        if _weights_finite(state):
            return True
        message = (
            f"The weights are not finite after batch {state.timestamp.batch}, so no checkpoint is written; the earlier ones "
            "stay. Resume from the latest of them with a lower learning rate or «clip_gradients=1.0»."
        )
        if self._policy == "raise":
            raise NotFinite(message)
        warn(message, RuntimeWarning)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped batches, and the recorded checks that were not reported yet."""
        return {"skipped": self.skipped, "noted": self._recorded, "overflowed": self._overflowed}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.skipped, self._recorded, self._overflowed = tree["skipped"], tree["noted"], tree["overflowed"]

    def _place(self, state: State) -> str:
        place = f"epoch {state.timestamp.epoch}, batch {state.timestamp.batch_in_epoch} in it"
        return f" ({place}{f', step {state.step.name!r}' if state.step.name else ''})"

    def _report(self, state: State, where: str) -> None:
        loss = "unknown" if state.loss is None else f"{state.loss.item():g}"
        norm = "" if state.gradient_norm is None else f", its gradient norm {state.gradient_norm.item():g}"
        where = f"{where}{self._place(state)}"
        if self._policy == "raise":
            raise NotFinite(
                f"The loss or a gradient is not finite in {where}: the latest loss is {loss}{norm}. Lower the learning "
                f"rate, {self.hints}, or continue with «nonfinite='skip'» or «nonfinite='warn'»."
            )
        skipped = self._policy == "skip" or self._overflowed
        done = f"the {self.unit} is skipped" if skipped else "training continues with it"
        self.skipped += self._policy == "skip"
        self._found += 1
        if self._found & (self._found - 1) == 0:  # 1, 2, 4, 8, …: a run that has diverged would warn in every batch
            self._told = self._found
            often = f" It happened {self._found} times; the next warning comes at {2 * self._found}."
            warn(f"Not finite in {where}: loss {loss}{norm}; {done}.{often if self._found > 1 else ''}", RuntimeWarning)


def _gradients_finite(state: State) -> bool:
    gradients = [parameter.grad for parameter in state.trained_parameters() if parameter.grad is not None]
    return not non_finite(gradients).item()


def _weights_finite(state: State) -> bool:
    """Whether the weights are finite on every rank. Every rank has to call it, because ranks may hold different weights."""
    parameters = (parameter for parameter in state.trained_parameters() if parameter.is_floating_point())
    shards = (dense_values(local(parameter.detach())) for parameter in parameters)
    weights = [shard for shard in shards if shard.numel()]
    if all(weight.is_cpu for weight in weights):  # on CPUs aminmax runs at memory bandwidth, a norm at a tenth of it
        finite = all(math.isfinite(extreme.item()) for weight in weights for extreme in weight.aminmax())
    else:
        finite = bool(torch.isfinite(total_norm(weights, math.inf)).item())
    if state.strategy.world_size > 1:
        finite = bool(state.bus.all_reduce(torch.tensor(int(finite)), "min").item())
    return finite
