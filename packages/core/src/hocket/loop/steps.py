"""Take optimizer steps on loss functions; `hocket.Task.train_batch` and the loops of `hocket.Runtime` call this."""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hocket.basics.kinds import singular
from hocket.basics.plugin_errors import PlanError
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import attributes, failures, warn
from hocket.hookspecs.strategies import replicas
from hocket.loop.carry import check_carry
from hocket.loop.loss_functions import code_of, described, versions_of
from hocket.state.step import Boundary, Step, UserStep, count, parameters_of
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State


#: How to use what a step returns.
RESULT = (
    "step(…) returns an object with loss, losses, gradient_norm, taken and kept. Write step(…).loss for the loss, a tensor, "
    "and step(…).loss.item() for the number."
)


class StepResult(NamedTuple):
    """The result of a step.

    ``loss``: the mean over the batch of all ranks, a scalar without a graph; ``losses``: the named losses that it is the sum
    of. ``gradient_norm``: before clipping, if clipping by norm computed it. ``taken``: whether the optimizers have stepped;
    False if the loss was non-finite under ``nonfinite="skip"``, or scaled gradients overflowed. ``kept``: what the loss
    function kept (`hocket.Loss`), for the full batch; if the step was not taken, the ``carry`` that it was given.
    """

    loss: Tensor
    losses: Mapping[str, Tensor]
    gradient_norm: Tensor | None
    taken: bool
    kept: Any


def _missing(result: StepResult, name: str) -> NoReturn:
    raise AttributeError(f"'StepResult' object has no attribute {name!r}. {RESULT}", name=name, obj=result)


StepResult.__getattr__ = _missing  # type: ignore[attr-defined]

_NOTHING: Any = object()


@attributes.elsewhere
class Steps:
    """Call it to take a step: ``step(loss_function, batch, *optimizers)``.

    Each step does everything that the step of a task with one loss does: it zeroes gradients, weights microbatches exactly,
    scales the loss, clips gradients, guards against non-finite losses and calls plug-ins. Parameters that only other
    optimizers hold get no gradients.

    `hocket.loop.task_steps` has the subclass for `hocket.Task.train_batch`, `hocket_strategies.custom_loops.loop_steps`
    the one for `hocket.Runtime`.

    Args:
        take: computes the gradients of the current step and steps; see `hocket.loop.fit.FitLoop`.
        compiled: compiles a loss function that is a method of the task; None to leave it as it is.
    """

    #: The user's code that calls the steps, for messages.
    caller = ""
    #: Where optimizers get their names, by a name that does not exist.
    _naming = "Name them in configure_optimizers, which may return a dict, or in the Trainer's «optimizer={{{!r}: …}}»."
    #: The first argument of a loss function, if it is a method.
    _bound = "self, "

    def __init__(
        self,
        state: State,
        take: Callable[[], bool],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        self._state, self._take, self._compiled = state, take, compiled
        #: The step of each loss function and its optimizers, which remembers how its losses are weighted.
        self._steps: dict[tuple[Any, str], UserStep] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        #: Whether a step is running, and whether the listeners were checked.
        self._busy = self._checked = False
        #: Number of steps that each optimizer has taken, by id.
        self._taken: Counter[int] = Counter()

    # --- what users call

    def __call__(
        self, loss_function: Callable[..., Any], batch: Batch, *optimizers: str, carry: Any = _NOTHING
    ) -> StepResult:
        """Compute the gradients of ``loss_function(batch)`` and step.

        Args:
            loss_function: takes a batch, or with ``carry`` a batch and the carry, and returns what `hocket.Task.loss` may
                return; in a task, a method. It may be called several times, with microbatches.
            batch: the loss function's input. If a tensor in it has a graph, gradients flow through that graph once, after the
                last microbatch.
            optimizers: names of the optimizers to step; none for all.
            carry: a second argument of the loss function, split as the batch is, such as a hidden state.

        Raises:
            ValueError: there is no optimizer of that name; the step's optimizers share parameters; or ``carry`` has another
                number of samples than ``batch``.
            RuntimeError: called within a loss function or outside of `train_batch`; or ranks take different steps.
        """
        self._check_call(loss_function, batch, optimizers)
        state, outer = self._state, self._state.step
        arguments = ("batch",) if carry is _NOTHING else ("batch", "carry")
        known = len(self._steps)
        step = self._begin(loss_function, "+".join(optimizers), self._indices(optimizers), arguments)
        first = len(self._steps) > known
        versions = versions_of(batch) if first else []
        step.batch, step.boundary = Boundary.of(batch)
        step.counts, step.metrics, step.carry = outer.counts, outer.metrics, () if carry is _NOTHING else (carry,)
        if step.carry:
            check_carry(state, batch, carry)
        step.samples, step.trained_on = self._count(step.name, described(loss_function), batch)
        self._busy = True
        taken = False
        try:
            with self._around(), self._first_step(loss_function) if first else nullcontext():
                state.step = step
                state.bus.begin_step(step.name)
                if step.trained_on:
                    taken = self._take()
        except (RuntimeError, ValueError) as error:
            if step.others and ("does not require grad" in str(error) or "loss has no gradient" in str(error)):
                failures.explain(error, "step.others", state.task, step.name, state.optimizer_names, step.others)
            raise
        finally:
            self._busy, state.step = False, outer
            step.batch = step.outputs = step.boundary = None
            step.carry = ()
        if first and versions != versions_of(batch):
            raise WrongState(
                f"{described(loss_function)} changed a tensor of its batch in place, so that microbatches and the next step "
                "would see other values. Write x = x * 10 instead of x *= 10 or x.mul_(10)."
            )
        self._report(step, outer, taken)
        before = None if carry is _NOTHING else carry
        if step.loss is None:  # no rank has a sample in this step
            return StepResult(torch.zeros((), device=state.device), {}, None, False, before)
        # A rank that only computes on padding keeps nothing of it.
        kept, step.kept = state.task.join(step.kept) if step.kept else before, []
        return StepResult(step.loss, step.losses, step.gradient_norm, bool(taken), kept if taken else before)

    def _report(self, step: UserStep, outer: Step, taken: bool) -> None:
        """Count a step, and log its losses, if any rank has a sample in it."""
        if taken:
            self._taken.update(map(id, self._state.optimizers if step.optimizers is None else step.optimizers))
        outer.loss, outer.losses, outer.gradient_norm = step.loss, step.losses, step.gradient_norm
        if step.loss is not None:
            self._log(step)

    def any(self, flag: bool | Tensor) -> bool:
        """Whether ``flag`` is true on any rank. Decide by it where all ranks must do the same. Waits for the device."""
        return bool(self._agree("any", "", float(bool(flag))))

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over ranks. Waits for the device."""
        return self._agree("mean", "", float(value)) / self._state.strategy.world_size

    # --- inside

    def _first_step(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        """Return a context around the first step of a loss function, which warns of mistakes."""
        unnamed = [code.co_name for code, name in self._steps if not name and hasattr(code, "co_name")]
        return failures.first_step_checked(self._state, described(function), self.caller, unnamed)

    def _check_call(self, loss_function: object, batch: Batch, optimizers: Sequence[object]) -> None:
        """Raise TypeError for arguments that are something else; RuntimeError if a step cannot be taken now."""
        if self._busy:
            raise WrongState(f"step(…) is called in {self.caller}, not in a loss function: return the loss there.")
        form = "Write step(loss_function, batch, 'optimizer', …), with optimizers by name."
        if not callable(loss_function):
            raise WrongType(
                f"step(…) was given {type(loss_function).__name__} as its loss function. {form} The loss function is called "
                "with the batch, perhaps several times, so it cannot be a loss that was computed already."
            )
        if isinstance(batch, str):
            raise WrongType(f"step(…) was given {batch!r} as its batch. {form}")
        if wrong := [name for name in optimizers if not isinstance(name, str)]:
            known = ", ".join(map(repr, self._state.optimizer_names))
            raise WrongType(
                f"step(…) was given {type(wrong[0]).__name__} as the name of an optimizer; the names are {known}. {form}"
            )
        if not torch.is_grad_enabled():
            raise WrongState(
                f"step(…) is called under torch.no_grad() or torch.inference_mode() in {self.caller}, where no loss has a "
                "gradient. Call it outside of that block."
            )

    def _check_function(self, function: Callable[..., Any], arguments: Sequence[str]) -> None:
        """Raise TypeError if a loss function cannot be called with these arguments."""
        try:
            inspect.signature(function).bind(*arguments)
        except ValueError:  # it has no signature
            return
        except TypeError as error:
            named = ", ".join(arguments)
            name = getattr(function, "__name__", "loss_function")
            form = f"lambda {named}: …" if name == "<lambda>" else f"def {name}({self._bound}{named})"
            if getattr(function, "__func__", None) is type(self._state.task).loss:
                form = "step(self.loss_of, batch), which calls forward(batch) and loss(outputs, batch)"
            raise WrongType(
                f"step(…) calls its loss function with ({', '.join(arguments)}), and {described(function)} takes other "
                f"arguments: {error}. Write {form}."
            ) from None

    def _begin(
        self, function: Callable[..., Any], name: str, indices: Sequence[int], arguments: Sequence[str]
    ) -> UserStep:
        key = (code_of(function), name)
        if (step := self._steps.get(key)) is None:
            step = self._steps[key] = UserStep(name)
            self._check_function(function, arguments)
            self._check_shared(indices)
        own = getattr(function, "__func__", None)  # of a method
        if own is not Task.loss_of:
            self._check_listeners()
            step.loss_function = self._compile(own, function)
        self._choose(step, indices)
        step.loss = step.gradient_norm = step.inputs = None
        step.losses = {}
        return step

    def _choose(self, step: UserStep, indices: Sequence[int]) -> None:
        """Set the optimizers of a step, and the parameters that get no gradients in it."""
        if indices:
            state = self._state
            step.optimizers = [state.optimizers[index] for index in indices]
            others = [optimizer for number, optimizer in enumerate(state.optimizers) if number not in indices]
            own = set(map(id, parameters_of(step.optimizers)))
            step.others = [p for p in parameters_of(others) if p.requires_grad and id(p) not in own]

    def _compile(self, own: object, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._compiled is None or own is None:
            return function
        if own not in self._functions:
            self._functions[own] = self._compiled(function)
        return self._functions[own]

    def _indices(self, names: Sequence[str]) -> list[int]:
        known = self._state.optimizer_names
        for name in names:
            if name not in known:
                raise WrongValue(
                    f"step(…, {name!r}) does not name an optimizer; there {'is' if len(known) == 1 else 'are'} "
                    f"{', '.join(map(repr, known))}. {self._naming.format(name)}"
                )
        return [known.index(name) for name in dict.fromkeys(names)]

    def _count(self, name: str, function: str, batch: Batch) -> tuple[int, int]:
        """Return the number of samples in a step on this rank, and on all ranks together."""
        state = self._state
        samples = self._samples(batch)
        if state.strategy.world_size == 1:
            return samples, samples
        total = int(self._agree("step", f"{function} for {name or 'all optimizers'}", samples))
        return samples, total // replicas(state.strategy)

    def _samples(self, batch: Batch) -> int:
        """Return the number of samples in a step's batch on this rank; 0 on a padding batch."""
        try:
            return count(self._state, batch).samples
        except Exception as error:
            error.add_note(f"The batch is the one that {self.caller} gave to step(…).")
            raise

    def _agree(self, what: str, name: str, value: float) -> float:
        """Return the sum of ``value`` over ranks. Raises RuntimeError, naming each rank's call, if the calls differ."""
        state = self._state
        world = state.strategy.world_size
        if world == 1:
            return value
        asked = zlib.crc32(f"{what} {name}".encode())
        values = torch.tensor([asked, asked**2 % 65521, value], dtype=torch.float64)  # integers are exact up to 2**53
        first, second, total = state.bus.all_reduce(values, "sum").tolist()
        if first != asked * world or second != asked**2 % 65521 * world:
            calls = {"return": "returned from train_batch", "any": "called step.any", "mean": "called step.mean"}
            called = f"called step(…) with {name}" if what == "step" else f"is at {name}"
            doing = state.bus.all_gather_object(calls.get(what, called))
            raise WrongState(
                f"Ranks make different calls in {self.caller}: "
                + "; ".join(f"rank {rank} {call}" for rank, call in enumerate(doing))
                + ". All take the same steps; decide with step.any(flag) or step.mean(number), which are the same on all ranks."
            )
        return float(total)

    def _check_listeners(self) -> None:
        """Raise PlanError for algorithms that act between model and loss: a custom loss function computes both in one call."""
        if self._checked:
            return
        self._checked = True
        bus = self._state.bus
        for event in ("after_forward", "before_loss"):
            attachments = bus.listeners(event)
            if acting := [attached for attached in attachments if attached.kind in ("algorithms", "task")]:
                who = ", ".join(f"{singular(attached.kind)} {attached.name!r}" for attached in acting)
                raise PlanError(
                    f"{who[0].upper()}{who[1:]} acts on {event}, between a model's outputs and the loss, which "
                    f"the loss functions of {type(self._state.task).__name__}.train_batch compute in one call. Remove it, or "
                    "train with step(self.loss_of, batch), which calls forward(batch) and loss(outputs, batch) separately."
                )
        if self._state.step.metrics is not None:
            warn("train_metrics see the outputs of step(self.loss_of, batch) only, not those of other loss functions.")

    def _check_shared(self, indices: Sequence[int]) -> None:
        """Raise ValueError if optimizers of one step share parameters, which that step would change twice."""
        state, holders = self._state, dict[int, str]()
        for index in indices or range(len(state.optimizers)):
            name = state.optimizer_names[index]
            for parameter in parameters_of([state.optimizers[index]]):
                if (other := holders.setdefault(id(parameter), name)) != name:
                    raise WrongValue(
                        f"The optimizers {other!r} and {name!r} share parameters, which one step of both would change twice. "
                        f"Take a step for each: step(…, {other!r}), then step(…, {name!r})."
                    )

    def _check_weights(self) -> None:
        """Raise RuntimeError if the caller changed a parameter under autograd: such a parameter silently does not train."""
        if any(parameter.grad_fn is not None for parameter in self._state.parameters):
            named = self._state.task.named_parameters()
            name = next(name for name, parameter in named if parameter.grad_fn is not None)
            raise WrongState(
                f"{self.caller} changed {name} under autograd, so that it is not a leaf any more and gets no gradient. Change "
                "weights under torch.no_grad()."
            )

    # --- what subclasses do around a step

    def _around(self) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        return nullcontext()

    def _log(self, step: UserStep) -> None:
        """Log the losses of a step."""
