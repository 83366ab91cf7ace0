"""Take the steps of a custom loop, as a task's `train_batch` does; see `hocket.Runtime.stepper`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.basics.run_folder import Run, TemporaryFolder
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import attributes
from hocket.hookspecs.needs import Need
from hocket.loop import settings
from hocket.loop.actions import gradients_again
from hocket.loop.nonfinite import NonFiniteGuard
from hocket.loop.steps import StepResult, Steps
from hocket.run.same_on_ranks import of_values, over_ranks
from hocket.state.state import State
from hocket.state.step import parameters_of
from hocket.state.task import SupervisedTask, Task
from hocket_strategies.custom_loops.prepared import PreparedModel, inner, is_whole

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket_strategies.custom_loops.accumulation import Gradients
    from hocket_strategies.custom_loops.runtime import Runtime

#: On devices that compute asynchronously, non-finite losses are reported every so many steps, instead of waiting in each.
REPORT_EVERY = 10


@attributes.elsewhere
class LoopSteps(Steps):
    """The steps of a custom loop: call it to take one, as described in `Steps`.

    After a step gradients are None.

    Args:
        state: the model and the optimizers to step; its timestamp counts steps.
        gradients: the counts of the current batch, and the model of the current step, for the Runtime.
        guard: handles non-finite losses and gradients.
    """

    caller = "the training loop"
    _naming = "Name them in step = runtime.stepper(model, {}=optimizer)."
    _bound = ""

    def __init__(self, state: State, gradients: Gradients, guard: NonFiniteGuard) -> None:
        super().__init__(state, self._take_step, None)
        self._gradients, self._guard = gradients, guard

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            from hocket.help import failures  # only needed for error messages

            failures.explain(error, "step", None)
            raise

    def report(self) -> None:
        """Report non-finite losses that were recorded on the device. Raises FloatingPointError under ``"raise"``."""
        self._guard.interval_end(self._state)

    def _take_step(self) -> bool:
        state = self._state
        state.bus.gradients(state)
        return self._guard.allows(state) and state.bus.optimizer_step(
            state, partial(gradients_again, state, self._guard)
        )

    def _check_call(self, loss_function: Any, batch: Batch, optimizers: Sequence[Any]) -> None:
        super()._check_call(loss_function, batch, optimizers)
        self._check_weights()
        if any(parameter.grad is not None for parameter in self._state.parameters):
            raise WrongState(
                "backward() was called before step(…), which sets gradients to zero, so they would be lost. Compute that loss "
                "in the loss function; or call runtime.step(optimizer), or model.zero_grad(), first."
            )

    def _samples(self, batch: Batch) -> int:
        padding = self._gradients.batch is not None and not self._gradients.batch[0]
        return 0 if padding else super()._samples(batch)

    @contextmanager
    def _around(self) -> Iterator[None]:
        state = self._state
        self._gradients.stepping = state.prepared
        try:
            yield
            state.timestamp.next_batch(state.step.trained_on, 0, 0.0)
            if state.timestamp.batch % REPORT_EVERY == 0:
                self.report()
        finally:
            self._gradients.stepping = None
            for parameter in state.parameters:
                parameter.grad = None
            state.bus.begin_step("")  # the loss scale of `Runtime.backward`
        state.device_kind.batch_end()


def make_steps(
    runtime: Runtime, model: nn.Module, optimizers: Mapping[str, Optimizer], microbatch: Any, clip: Any, nonfinite: Any
) -> LoopSteps:
    """Return the steps of a loop, from the arguments of `hocket.Runtime.stepper`, checked."""
    strategy = runtime.strategy
    if not isinstance(model, PreparedModel) or not is_whole(model):
        raise WrongType(
            f"stepper was given {model.__class__.__name__}. Give it what setup returned: model, optimizer = "
            "runtime.setup(model, optimizer); step = runtime.stepper(model, optimizer)."
        )
    if Need.SEVERAL_STEPS not in strategy.offers:
        raise WrongValue(
            f"Strategy {type(strategy).__name__} steps all optimizers at once, so it has no stepper. Choose another strategy=, "
            "such as 'ddp', or call runtime.backward and runtime.step."
        )
    if settings.microbatch(microbatch) == "auto":
        raise WrongValue(
            "microbatch='auto' is for hocket.Trainer. Give a number of samples, such as microbatch=8, or None."
        )
    clipping = settings.clipping("clip", clip)
    guard = LoopGuard(settings.policy(nonfinite), runtime.device_kind.asynchronous)
    run = Run.new(None)
    state = State(
        task=model.module if isinstance(model.module, Task) else SupervisedTask(model.module, None),
        bus=runtime.bus,
        strategy=strategy,
        precision=runtime.precision,
        device=runtime.device,
        device_kind=runtime.device_kind,
        run=run,
        folder=TemporaryFolder(Path(), run),
        microbatch=microbatch,
    )
    state.prepared, state.optimization.clipping = inner(model), clipping
    state.optimization.loss_reduction = settings.reduction(state.task.loss_reduction)
    state.optimization.parameters = list(model.parameters())
    if "torch._dynamo" in sys.modules:  # without it nothing is compiled
        from hocket.loop.graphs import may_overwrite

        state.overwrites = may_overwrite(state.task, None, state.device)
    state.optimization.optimizer_names = list(optimizers)
    state.optimization.optimizers = list(optimizers.values())
    _check_optimizers(state)
    given = {"optimizers": state.optimizer_names, "clip": clip, "nonfinite": nonfinite}
    over_ranks(runtime.bus, runtime.world_size, of_values({f"stepper({name})": value for name, value in given.items()}))
    if Need.FULL_PARAMETERS not in strategy.offers:
        # A first call, of nothing: from now on the strategy refuses calls of a part outside of loss functions by name.
        with runtime.bus.accumulate(state.prepared, True), torch.no_grad():
            runtime.bus.call_prepared(state.prepared, _nothing, (), (), True)
    return LoopSteps(state, runtime._gradients, guard)


def _nothing() -> None:
    pass


def _check_optimizers(state: State) -> None:
    form = "Write model, optimizer = runtime.setup(model, optimizer); step = runtime.stepper(model, name=optimizer)."
    if not state.optimizers:
        raise WrongValue(f"stepper was given no optimizer. {form}")
    known = set(map(id, state.parameters))
    for name, optimizer in zip(state.optimizer_names, state.optimizers, strict=True):
        if not isinstance(optimizer, Optimizer):
            raise WrongType(f"stepper was given {name}={optimizer!r}, which is not an optimizer. {form}")
        held = parameters_of([optimizer])
        if foreign := sum(id(parameter) not in known for parameter in held):
            raise WrongValue(
                f"{type(optimizer).__name__} {name!r} holds {foreign} of {len(held)} parameters that are not in the model of "
                "stepper. Set up the model together with its optimizers, and several networks as one, such as "
                "nn.ModuleDict({'generator': …, 'critic': …})."
            )


class LoopGuard(NonFiniteGuard):
    """The guard of a custom loop, which counts steps."""

    unit, interval = "step", f"{REPORT_EVERY} steps"
    hints = "clip gradients (clip=1.0), look for the operation with torch.autograd.set_detect_anomaly(True)"

    def _place(self, state: State) -> str:
        return f" ({state.step.name})" if state.step.name else ""
