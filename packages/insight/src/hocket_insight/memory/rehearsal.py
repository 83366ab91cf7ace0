"""Rehearse two steps of a run with tensors that have no storage, and record the memory that they would take.

The Trainer itself takes the steps, with the strategy, precision, optimizer and algorithms of the run, so that all of them are
in the record. Other ranks are simulated: collectives return at once, as if every rank had the same values.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import _foreach_supported_types

from hocket.basics import objects
from hocket.basics.launch_environment import WorkerError
from hocket.data.nesting import map_tensors
from hocket.errors import Mistake, WrongValue
from hocket.help import optional_packages
from hocket.run.trainer import Trainer
from hocket.state.state import State
from hocket_insight.memory.fake_tensors import Hollow, quiet
from hocket_insight.memory.ledger import DataDependentError, Ledger

#: Arguments of the Trainer that every rehearsal has: a run of two steps on one batch, which writes nothing.
ARGUMENTS: dict[str, Any] = {
    "overfit": 1, "duration": "2ba", "min_duration": None, "eval_data": None, "eval_every": None, "sanity_eval": 0,
    "fast_dev_run": None, "limit_train": None, "callbacks": [], "loggers": [], "checkpoints": None, "resume": None,
    "compile": False, "log_every": "1000ba", "devices": None, "profile_plugins": False, "detect_anomaly": False,
    "summary": False,
}  # fmt: skip
#: What the parts of a step are called in estimates, by the name of the action.
_PHASES = {
    "gradients": "forward",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer_step": "step",
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The memory of one rank at its peak, in bytes by kind and by module, and when that was."""

    peak: int
    phase: str
    #: ``parameters`` (with buffers), ``gradients``, ``optimizer``, ``batch``, ``activations`` and ``other``.
    kinds: dict[str, int]
    #: Bytes by the name of a module and the kind, the largest first.
    modules: list[tuple[str, str, int]]
    #: Samples of this rank's batch, and of a microbatch.
    samples: int
    microbatch: int
    strategy: str
    device: str
    #: Memory of the device in bytes, if it is known.
    memory: int | None
    #: What else there is to say.
    notes: tuple[str, ...] = ()


class EstimateError(WrongValue):
    """A run cannot be rehearsed, or its configuration is wrong."""


class Stage:
    """What a rehearsal runs in: tensors without storage, the record of their memory, and simulated ranks."""

    def __init__(self) -> None:
        self.hollow, self.ledger = Hollow(), Ledger()
        self.notes: list[str] = []
        self._names: dict[nn.Module, str] = {}

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Compute without storage inside the context, and record."""
        with self.hollow, self.ledger:
            yield

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model without storage. If its constructor needs values, it is made as usual first, which a note says."""
        try:
            with self.modes():
                model = make()
        except Exception:
            model = make()
            self.notes.append(
                f"{type(model).__name__} was made on the CPU first, because its constructor reads values."
            )
        self.hollow.hollow_out(model)
        return model

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Have ``module.to`` and ``module.half`` convert hollow parameters, and let optimizers step on them together.

        torch refuses the first if there is a weak reference, and the second for classes that it does not know.
        """
        swap = torch.utils.swap_tensors

        def swapped(old: Tensor, new: Tensor) -> None:
            if isinstance(old, FakeTensor):
                old.data = new.data
            else:
                swap(old, new)

        torch.utils.swap_tensors = swapped
        _foreach_supported_types.append(FakeTensor)
        try:
            yield
        finally:
            torch.utils.swap_tensors = swap
            _foreach_supported_types.remove(FakeTensor)

    def modules(self, model: nn.Module) -> None:
        """Name modules in the record."""
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Record which module computes."""
        outer: list[str] = []

        def before(module: nn.Module, inputs: Any) -> None:
            outer.append(self.ledger.module)
            self.ledger.module = self._names.get(module, self.ledger.module)

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.ledger.module = outer.pop() if outer else ""

        handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Done(Exception):
    """Ends the rehearsal."""


#: Makes the Trainer of a rehearsal: with the model from `Stage.model`, in `Stage.modes`, with the given arguments.
Make = Callable[[Stage, dict[str, Any]], AbstractContextManager[Trainer]]


def rehearse(make: Make, ranks: int = 1, microbatch: int | None = None) -> Rehearsal:
    """Return the memory of a run on one of ``ranks`` ranks, rehearsed in a process of its own.

    Args:
        microbatch: samples of a forward pass; None for the number that the arguments of ``make`` say.

    Raises:
        EstimateError: the run computes something whose shape depends on values, or a mistake of the user.
        hocket.basics.launch_environment.WorkerError: another exception of the run.
        ImportError: hocket-strategies, which starts the process, is not installed.
    """

    def run(rank: int) -> Rehearsal | str:
        warnings.simplefilter("ignore")  # they are those of training
        try:
            with quiet():
                return _rehearse(make, ranks, {} if microbatch is None else {"microbatch": microbatch})
        except Exception as error:
            cause = error if error.__cause__ is None else error.__cause__
            if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
                return f"The result of {cause.func} depends on values, not only on shapes. {_INSTEAD}"
            if isinstance(cause, DataDependentError):
                return f"{cause} {_INSTEAD}"
            if "autograd's threading" in str(error):
                return "This process has computed gradients before, so that it cannot be forked. Estimate in a new one."
            if "Couldn't swap" in str(error):
                return (
                    "The precision converts the model to another dtype, which an estimate cannot follow. Estimate with "
                    "precision=fp32: weights, gradients and optimizer states take twice as much in fp64, half as much "
                    "in bf16-true and fp16-true."
                )
            if isinstance(error, Mistake):
                return str(error)
            raise

    forks = optional_packages.module("hocket_strategies.launching.forks", "an estimate")
    forks.check_forkable("an estimate")
    try:
        (result,) = forks.fork(run, 1, variables={})
    except WorkerError as error:
        raise WorkerError(error.rank, str(error).replace("Rank 0 of 1 raised", "The rehearsal raised", 1)) from None
    if isinstance(result, str):
        raise EstimateError(result)
    assert isinstance(result, Rehearsal)
    return result


_INSTEAD = (
    "An estimate computes with shapes only, without values. Measure instead: hocket train CONFIG fast_dev_run=2 "
    "callbacks=[memory-monitor] loggers=[console]; or move that code to the data."
)


def _rehearse(make: Make, ranks: int, arguments: dict[str, Any]) -> Rehearsal:
    stage = Stage()
    ledger = stage.ledger
    with ExitStack() as stack:
        stack.enter_context(ledger.resizing())
        stack.enter_context(stage.swapping())
        if ranks > 1:
            stack.enter_context(_simulated(ranks))
        stack.enter_context(stage.hooks())
        trainer = stack.enter_context(make(stage, ARGUMENTS | arguments))
        state = trainer.state
        stage.modules(state.model)
        state.optimization.loss_reduction = state.loss_reduction or "mean"  # which is otherwise found by trying losses
        with stage.modes():
            ledger.see([*state.task.parameters(), *state.task.buffers()])
        kinds: dict[str, set[int]] = {"gradients": set(), "optimizer": set(), "batch": set()}
        _listen(stage, trainer, kinds)
        with suppress(_Done):
            trainer.fit()
        return _result(stage, trainer, kinds)


def _listen(stage: Stage, trainer: Trainer, kinds: dict[str, set[int]]) -> None:
    """Have the actions of the Trainer run without storage, and record what is what."""
    ledger = stage.ledger
    bus = trainer.state.bus
    loop = trainer._loop
    loop._guard = _Finite()  # type: ignore[assignment]  # it reads values

    def phase(name: str, action: Callable[..., Any], modes: bool = False) -> Callable[..., Any]:
        @wraps(action)
        def acting(*args: Any) -> Any:
            before, ledger.phase = ledger.phase, name
            try:
                with stage.modes() if modes else ExitStack():
                    return action(*args)
            finally:
                ledger.phase = before

        return acting

    held: dict[int, tuple[Tensor, Tensor]] = {}  # of the batch, until its step ends
    move, step, gradients, end = bus.move_batch, bus.optimizer_step, bus.gradients, bus.batch_end

    def moved(state: Any, batch: Any) -> Any:
        hollow = map_tensors(lambda tensor: stage.hollow.view(tensor, held), batch)
        ledger.see(_tensors(hollow))
        kinds["batch"] |= ledger.numbers(_tensors(hollow))
        result = move(state, hollow)
        kinds["batch"] |= ledger.numbers(_tensors(result))
        return result

    def computed(state: Any) -> Any:
        result = gradients(state)
        kinds["gradients"] |= ledger.numbers(p.grad for p in state.task.parameters() if p.grad is not None)
        return result

    def stepped(state: Any, closure: Any) -> Any:
        result = step(state, closure)
        states = [values for optimizer in state.optimizers for values in optimizer.state.values()]
        kinds["optimizer"] |= ledger.numbers(_tensors(states))
        return result

    def ended(state: Any) -> None:
        held.clear()
        with stage.modes():
            end(state)
        if state.timestamp.batch >= 2:
            raise _Done
        loop._batch(*loop._loaded)  # the next step, on the same batch

    bus.replace(
        {
            "move_batch": moved,
            **{name: phase(_PHASES[name], getattr(bus, name)) for name in ("forward", "loss", "backward")},
            "gradients": phase("forward", computed, modes=True),
            "optimizer_step": phase("step", stepped, modes=True),
            "batch_end": phase("step", ended),
        }
    )


def _result(stage: Stage, trainer: Trainer, kinds: dict[str, set[int]]) -> Rehearsal:
    state, ledger = trainer.state, stage.ledger
    peak, last, alive = ledger.peak(state.device.type)
    tensors = [*state.task.parameters(), *state.task.buffers()]
    kinds = {"parameters": ledger.numbers(tensors), **kinds}
    sizes: Counter[str] = Counter(dict.fromkeys([*kinds, "activations", "other"], 0))
    modules: Counter[tuple[str, str]] = Counter()
    owners = _owners(state, ledger)
    for number in alive:
        allocation = ledger.allocations[number]
        computed = "activations" if allocation.phase in ("forward", "loss") or allocation.module else "other"
        kind = next((name for name, numbers in kinds.items() if number in numbers), computed)
        sizes[kind] += allocation.size
        modules[owners.get(number, allocation.module), kind] += allocation.size
    notes = [*stage.notes]
    if ledger.recurrent:
        notes.append(
            "the memory that LSTMs take on the CPU beside their outputs is not counted, and may be most of it: measure with "
            "memory-monitor."
        )
    return Rehearsal(
        peak=peak,
        phase=ledger.allocations[last].phase,
        kinds=dict(sizes),
        modules=[(name, kind, size) for (name, kind), size in modules.most_common(20)],
        samples=state.step.samples,
        microbatch=min(state.microbatch or state.step.samples, state.step.samples),
        strategy=type(state.strategy).__name__,
        device=state.device.type,
        memory=_memory(state.device),
        notes=tuple(notes),
    )


def _memory(device: torch.device) -> int | None:
    """Return the memory of a device in bytes; None if it is unknown."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None


def _owners(state: State, ledger: Ledger) -> dict[int, str]:
    """Return the names of modules by the allocations of their parameters, gradients and optimizer state."""
    states: dict[Tensor, Any] = {}
    for optimizer in state.optimizers:
        states.update(optimizer.state)
    return {
        number: f"{name}.{own}".lstrip(".")
        for name, module in state.model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        for number in ledger.numbers(
            [parameter, *([] if parameter.grad is None else [parameter.grad]), *_tensors(states.get(parameter, []))]
        )
    }


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


class _Finite:
    """In place of the guard against non-finite values, of which there are none."""

    def allows(self, state: Any) -> bool:
        return True

    def interval_end(self, state: Any) -> None: ...

    def fit_end(self, state: Any) -> None: ...


@contextmanager
def _simulated(ranks: int) -> Iterator[None]:
    """Be rank 0 of ``ranks`` that do not exist, in torch's fake process group, for tests of torch itself."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  # collectives of tensors without storage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if isinstance(tensor, FakeTensor) or op != dist.ReduceOp.SUM:
            return all_reduce(tensor, op, group, async_op)
        tensor.mul_(dist.get_world_size(group))
        return None

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    def gather(items: list[Any], item: Any, *args: Any, **options: Any) -> None:
        items[:] = [item] * len(items)

    replaced: dict[tuple[Any, str], Any] = {
        (dist, "new_group"): fake_group,
        (dist, "all_reduce"): reduce,
        (dist, "all_gather_object"): gather,
        (dist, "broadcast_object_list"): lambda *args, **options: None,
        # Tensors without storage cannot be pickled, and go nowhere.
        (objects, "pack"): lambda item: item,
        (objects, "unpack"): lambda item, here=None: item,
    }
    originals = {(module, name): getattr(module, name) for module, name in replaced}
    for (module, name), function in replaced.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)
