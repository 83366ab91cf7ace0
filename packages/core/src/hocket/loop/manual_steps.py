"""Take a step of a task's `train_batch` by hand: backward, clip and step in the caller's own order; see `TaskSteps.manual`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.kinds import singular
from hocket.basics.losses import Apart, Loss, as_loss
from hocket.basics.plugin_errors import PlanError
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import warn
from hocket.hookspecs.bus import Hooks
from hocket.hookspecs.events import Event, between
from hocket.hookspecs.needs import Need
from hocket.hookspecs.strategies import replicas
from hocket.loop.actions import clip_and_note, finish_gradients
from hocket.loop.graphs import copied, keep_gradients
from hocket.optim.closures import needs_closure
from hocket.strategies.base import Strategy

if TYPE_CHECKING:
    from hocket.hookspecs.attachment import Attachment
    from hocket.loop.nonfinite import NonFiniteGuard
    from hocket.loop.task_steps import TaskSteps
    from hocket.state.state import State
    from hocket.state.step import Step, UserStep

#: The kinds of plug-ins that may be unable to act; strategy, precision and the default actions always act.
_KINDS = ("algorithms", "task", "callbacks", "loggers")
#: Hooks of the forward pass, which `train_batch` computes itself.
_FORWARD_EVENTS = [event.value for event in between(Event.BEFORE_FORWARD, Event.BEFORE_LOSS)]
_OF_THE_FORWARD_PASS = ("split_batch", *_FORWARD_EVENTS, "forward", "loss")


class ByHand:
    """The gradients of some optimizers, in a ``with step.manual(…) as by_hand:`` block of `hocket.Task.train_batch`.

    Args:
        step: names the optimizers; it is the current step while the block is open.
        guard: handles non-finite losses and gradients.
        steps: of the `train_batch` that the blocks are in.
    """

    def __init__(self, state: State, step: UserStep, guard: NonFiniteGuard, steps: TaskSteps) -> None:
        self._state, self.current, self._guard, self._steps = state, step, guard, steps
        #: Gradients that wait for a step in a later block, by parameter; None if there are none or the block is open.
        self.gradients: list[Tensor | None] | None = None
        #: The sums over ranks of the losses since the last step, by name, "" for the total; and this rank's newer ones.
        self.losses: dict[str, Tensor] = {}
        self._newer: dict[str, Tensor] = {}
        #: Copies of gradients; see `keep_gradients`.
        self._copies: dict[int, Tensor] = {}
        #: Whether the block is open; whether there are gradients; whether they are complete, so that nothing may be added;
        #: and whether they were clipped.
        self._open = self._waiting = self._complete = self._clipped = False

    # --- what users call

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Add the gradients of a loss, scaled by the precision and weighted such that steps are on means over ranks.

        Args:
            loss: what a loss function may return; ``kept`` is not used. Over ranks a mean is weighted by the samples of the
                batch that `train_batch` was given; ``(mean, weight)`` brings its own weight.
            retain_graph: keep the graph, for another loss of the same forward pass.

        Raises:
            RuntimeError: called outside of the block, or between `clip` and `step`.
        """
        self._check("backward(loss)")
        if self._complete:
            raise WrongState(
                "by_hand.backward(loss) is called after by_hand.clip(…), when the gradients are unscaled and averaged over "
                "ranks. Clip after the last backward, right before by_hand.step()."
            )
        if isinstance(loss, Apart):
            raise WrongType(
                "by_hand.backward takes one loss, not hocket.Apart. Open a block for each of its optimizers."
            )
        state, step, hooks = self._state, self.current, self._steps._hooks
        if state.overwrites:
            loss = copied(loss)
        loss = as_loss(loss)
        share, factor = self._weigh(loss)
        with self._steps._outside():
            if not self._waiting:
                hooks.before_train_batch(state)
                state.bus.zero_grad(state)
                state.bus.begin_step(step.name)
                self._waiting = True
            step.loss = loss.value
            hooks.after_loss(state)
            hooks.before_backward(state)
            if factor != 0:  # a mean over nothing, as on a padding batch, may be NaN
                if retain_graph:
                    step.inputs = [parameter for parameter in state.trained_parameters() if parameter.requires_grad]
                    step.retain_graph = True
                try:
                    hooks.backward(state, step.loss if factor is None else step.loss * factor)
                finally:
                    step.inputs, step.retain_graph = None, False
            if state.overwrites:
                keep_gradients(state.trained_parameters(), self._copies)
            hooks.after_backward(state)
        for name, value in {"": step.loss, **loss.parts}.items():
            value = value.detach() if share is None else value.detach() * share if share else torch.zeros_like(value)
            self._newer[name] = self._newer[name] + value if name in self._newer else value
        step.loss = step.loss.detach()

    def clip(self, norm: float | None = None, *, value: float | None = None) -> Tensor | None:
        """Clip the gradients, and return their norm before that if it was computed, a scalar on the device.

        Afterwards ``.grad`` has the gradients that `step` uses: unscaled, and averaged over ranks. Without `clip`, `step` clips
        as the Trainer's ``clip_gradients`` and plug-ins say.

        Args:
            norm: the largest joint 2-norm; infinity only measures.
            value: the largest absolute value of an element. With neither, clip as the Trainer is configured.
        """
        self._check("clip(…)")
        if norm is not None and value is not None:
            raise WrongValue(
                f"by_hand.clip was given «norm={norm}» and «value={value}»; give one of them, such as «norm=1.0»."
            )
        if not self._waiting:
            raise WrongState("by_hand.clip(…) has no gradients to clip. Call by_hand.backward(loss) first.")
        state, configured = self._state, self._state.clipping
        if norm is not None:
            state.optimization.clipping = "norm", norm
        elif value is not None:
            state.optimization.clipping = "value", value
        try:
            with self._steps._outside():
                if not self._complete:
                    self._steps._hooks.gradients(state)
                clip_and_note(state, self._steps._hooks)
        finally:
            state.optimization.clipping = configured
        self._clipped = True
        return state.gradient_norm

    def step(self) -> bool:
        """Step the optimizers; the next backward begins with gradients of zero. Return whether the step was taken.

        It is not, if scaled gradients overflowed or, under ``nonfinite="skip"``, a loss or gradient is not finite.
        """
        self._check("step()")
        if not self._waiting:
            raise WrongState("by_hand.step() has no gradients to step with. Call by_hand.backward(loss) first.")
        if not self._clipped:
            self.clip()
        state = self._state
        with self._steps._outside():
            allowed = self._guard.allows(state)
            self._steps._changed()
            taken = allowed and bool(self._steps._hooks.optimizer_step(state, _no_closure))
        self._steps._report(self.current, self._outer, taken)
        self._forget()
        return taken

    def zero_grad(self) -> None:
        """Discard the gradients since the last step."""
        self._check("zero_grad()")
        self._state.bus.zero_grad(self._state)
        self._forget()

    # --- what `TaskSteps` calls

    @contextmanager
    def opened(self, outer: Step) -> Iterator[ByHand]:
        """Make this the current step, with the gradients that wait for it, inside the context."""
        state, step, waiting, self._outer = self._state, self.current, self.gradients, outer
        step.batch, step.counts = outer.batch, outer.counts
        step.samples, step.trained_on = outer.samples, outer.trained_on
        with self._steps._outside():  # autocast forgets the weights that it has converted for other steps
            for parameter in state.parameters:
                parameter.grad = None
            state.step = step
            self._open, self.gradients = True, None
            if waiting is not None:
                for parameter, gradient in zip(state.trained_parameters(), waiting, strict=True):
                    parameter.grad = gradient
                state.bus.begin_step(step.name)
            self._train_others(False)
        try:
            yield self
            if self._complete:
                raise WrongState(
                    "The block of step.manual ends after by_hand.clip(…) and before by_hand.step(). Call step() there, or clip "
                    "in the block that steps."
                )
            with self._steps._outside():
                if self._waiting:
                    self._keep()
        except BaseException:
            if waiting is None:
                self._forget()  # a fit that goes on computes them anew
            else:
                self._steps._changed()
            raise
        finally:
            self._train_others(True)
            self._open, step.batch, state.step = False, None, outer

    def restore(self, gradients: Sequence[Tensor | None], losses: Mapping[str, Tensor]) -> None:
        """Continue with saved gradients and losses."""
        device = self._state.device
        self.gradients = [None if gradient is None else gradient.to(device) for gradient in gradients]
        self.losses, self._waiting = {name: value.to(device) for name, value in losses.items()}, True

    # --- inside

    def _agree(self, call: str, value: float) -> float:
        """Return the sum of a number over ranks. Raises RuntimeError if they make different calls."""
        return self._steps._agree("manual", f"by_hand.{call} of {self.current.name or 'all optimizers'}", value)

    def _check(self, call: str) -> None:
        if not self._open:
            raise WrongState(
                f"by_hand.{call} is called outside of its block. Write it in the block: with step.manual(…) as by_hand: …"
            )

    def _weigh(self, loss: Loss) -> tuple[float | None, float | None]:
        """Return what this rank's loss counts for in that of all ranks, and the factor of its gradient; None for 1."""
        state, samples = self._state, self.current.samples
        if state.strategy.world_size == 1:
            return None, None
        summed = (loss.reduction or state.loss_reduction) == "sum"
        own: Any = 1 if summed else loss.weight
        weight = 0.0 if not samples else float(samples if own is None else own)
        total = self._agree("backward(…)", weight)
        share = weight if summed else weight / total if total else 0.0
        if state.strategy.averages_gradients:
            return share, share * state.strategy.world_size
        return share, float(bool(weight))

    def _train_others(self, trained: bool) -> None:
        for parameter in self.current.others:
            parameter.requires_grad_(trained)

    def complete(self) -> bool:
        """Complete the gradients: the inner implementation of the action `gradients`, which plug-ins may wrap."""
        state, step = self._state, self.current
        self._average("step()")
        step.loss = self.losses[""]
        step.losses = {name: value for name, value in self.losses.items() if name}
        finish_gradients(state, hooks=self._steps._hooks, clip=False)
        self._complete = True
        return True

    def _keep(self) -> None:
        """Keep the gradients for a later block."""
        state = self._state
        if not state.strategy.averages_gradients:
            raise WrongValue(
                f"The block of step.manual ends without by_hand.step(), and strategy {type(state.strategy).__name__} steps "
                "each rank on its own, where gradients cannot wait for a later batch. Step in each block, or use "
                "strategy='ddp'."
            )
        self._average("the end of the block")
        self.gradients = [parameter.grad for parameter in state.trained_parameters()]
        for parameter in state.parameters:
            parameter.grad = None
        self._steps._changed()

    def _average(self, call: str) -> None:
        """Turn what this rank has added to gradients and losses into the means over ranks."""
        state, newer = self._state, self._newer
        if state.strategy.world_size > 1:
            names = sorted(newer)
            self._agree(f"{call} after the losses {names}", 0.0)
            if names:
                sums = state.bus.all_reduce(torch.stack([newer[name] for name in names]), "sum")
                newer = dict(zip(names, sums.unbind(), strict=True))
                self._train_others(True)  # ddp looks at which parameters are trained
                with state.bus.accumulate(state.prepared, True):
                    state.bus.reduce_gradients(state.prepared, state.trained_parameters())
                self._train_others(False)
        for name, value in newer.items():
            self.losses[name] = self.losses[name] + value if name in self.losses else value
        self._newer = {}

    def _forget(self) -> None:
        self._waiting = self._complete = self._clipped = False
        self.losses, self._newer, self._copies = {}, {}, {}


def _no_closure() -> Tensor:
    raise WrongState(
        "A plug-in or optimizer computes gradients again, which a step by hand cannot. Take the step with "
        "step(loss_function, batch, …)."
    )


def check(state: State, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError if these optimizers cannot be stepped by hand in this run."""
    strategy = state.strategy
    instead = "Take the step with step(loss_function, batch, …)"
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise WrongValue(
                f"{type(optimizer).__name__} computes gradients itself, which step.manual cannot do again. {instead}, or use "
                "another optimizer."
            )
    if state.microbatch is not None or any(attached.name == "auto-microbatch" for attached in state.bus.attachments):
        raise WrongValue(
            "step.manual computes on the batch as a whole, so «microbatch=» and «accumulate=» cannot divide it. Omit them, and "
            f"call by_hand.backward once for each part of the batch; or {instead[0].lower()}{instead[1:]}, which divides it."
        )
    if Need.FULL_PARAMETERS not in strategy.offers or replicas(strategy) > 1:
        raise PlanError(
            f"step.manual needs full parameters on every rank, and strategy {type(strategy).__name__} shards them. {instead}, "
            "or use «strategy='ddp'»."
        )
    if strategy.world_size > 1 and getattr(type(strategy), "reduce_gradients", None) is Strategy.reduce_gradients:
        raise PlanError(
            f"Strategy {type(strategy).__name__} does not define reduce_gradients, by which step.manual averages gradients "
            "over ranks. Define it there, or use «strategy='ddp'»."
        )


class ManualHooks(Hooks):
    """The hooks of steps by hand: those of the bus without the plug-ins that cannot act in them; it warns of each of these.

    Args:
        complete: completes the gradients; plug-ins that wrap the action `gradients` surround it.
        compiled: whether the Trainer compiles loss functions.
    """

    def __init__(self, state: State, complete: Callable[[State], bool], compiled: bool) -> None:
        self._bus, self._idle = state.bus, _idle(state)
        for attachment, why in self._idle.items():
            kind = singular(attachment.kind).capitalize()
            _warn(f"{kind} '{attachment.name}' does not act in steps by hand (step.manual): {why}")
        if state.step.metrics is not None:
            _warn("train_metrics do not see the outputs of steps by hand (step.manual)")
        if compiled:
            _warn("«compile=» compiles loss functions, and not the code of steps by hand (step.manual)")
        vars(self)["gradients"] = self._bus.compiled("gradients", self._idle, complete)

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        """Compile a hook when it is called for the first time."""
        function = vars(self)[hook] = self._bus.compiled(hook, self._idle)
        return function


def _warn(what: str) -> None:
    warn(f"{what}. Take the step with step(loss_function, batch, …) to change that.")


def _idle(state: State) -> dict[Attachment, str]:
    """Return the plug-ins that cannot act in steps by hand, and why."""
    bus = state.bus
    reasons: dict[Attachment, str] = {}
    for hook in _OF_THE_FORWARD_PASS:
        for attachment in bus.listeners(hook):
            reasons.setdefault(attachment, f"it acts on {hook}, and train_batch computes the loss itself there")
    for attachment in bus.listeners("gradients", wrappers=False):
        reasons.setdefault(attachment, "it computes the gradients of a batch")
    for attachment in bus.attachments:
        if attachment.kind == "algorithms" and Need.SECOND_GRADIENT in attachment.obj.needs:
            reasons.setdefault(
                attachment, "it computes gradients a second time, and the loss of such a step is computed once"
            )
    return {attachment: why for attachment, why in reasons.items() if attachment.kind in _KINDS}
