"""Summarize a model by module: output shapes, parameters, memory and FLOPs, without computing anything."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from hocket.basics import display, seeding
from hocket.data.batches import Window
from hocket.data.nesting import map_tensors
from hocket.errors import Mistake, WrongValue
from hocket.help import warn
from hocket.help.arguments import understood
from hocket.help.raised import raised
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.state import conversions
from hocket.state.given_task import task_of
from hocket.state.task import Task
from hocket_insight.flop_counting import FUSED, BackwardCounter
from hocket_insight.memory.estimate import aligned, shown
from hocket_insight.memory.fake_tensors import Hollow, quiet

if TYPE_CHECKING:
    from hocket.state.state import State


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One module. Numbers include the modules inside it, and count a shared tensor once."""

    name: str
    kind: str
    #: The shapes of its output in the first call; empty if it was not called.
    outputs: tuple[tuple[int, ...], ...]
    calls: int
    parameters: int
    trainable: int
    buffers: int
    #: Bytes of parameters and buffers.
    bytes: int
    #: FLOPs of all calls, and of the backward pass.
    forward_flops: int
    backward_flops: int


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """The layers of a model, with the model itself first. Printed, it is a table."""

    layers: tuple[Layer, ...]
    #: What else there is to say, in one line each.
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Layer:
        """The model itself."""
        return self.layers[0]

    def __str__(self) -> str:
        rows = [
            ["module", "type", "output", "calls", "parameters", "trainable", "buffers", "size", "forward", "backward"]
        ]
        for each in self.layers[1:] + self.layers[:1]:
            depth = each.name.count(".") if each.name else 0
            rows.append([
                "  " * depth + (each.name or "total"),
                each.kind,
                ", ".join("x".join(map(str, shape)) or "scalar" for shape in each.outputs) or "-",
                str(each.calls),
                f"{each.parameters:,}",
                f"{each.trainable:,}",
                f"{each.buffers:,}",
                shown(each.bytes),
                *(flops(number) for number in (each.forward_flops, each.backward_flops)),
            ])  # fmt: skip
        return "\n".join([aligned(rows), *self.notes])

    def _repr_html_(self) -> str:
        return display.html("Model", {"": str(self)})


def flops(number: int) -> str:
    """Return a number of floating-point operations for people.

    Example:
        >>> from hocket_insight.model_table import flops
        >>> flops(3_628_146_688)
        '3.63 GFLOP'
    """
    for exponent, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**exponent:
            return f"{number / 10**exponent:.2f} {unit}FLOP"
    return f"{number} FLOP"


@understood
def model_summary(
    model: nn.Module,
    batch: Any,
    *,
    loss: Any = None,
    inputs: Any = None,
    targets: Any = None,
    depth: int | None = 3,
) -> ModelSummary:
    """Return a summary of ``model`` for ``batch``, by module.

    A copy of the model without storage runs forward and loss, so nothing is computed or allocated, and model, random numbers
    and modes stay bitwise as they were. FLOPs are those of matrix products, convolutions and attention, as
    `torch.utils.flop_counter.FlopCounterMode` counts them: a multiplication and an addition are two. Those of the backward
    pass follow from the operands that need gradients, without the recomputation of activation checkpointing. Shared
    parameters count once in each row. Sharded parameters (DTensor) count in full.

    Args:
        model: an `nn.Module` or a `hocket.Task`, on any device, the meta device too.
        batch: a batch as training has it, real or on the meta device; only shapes and dtypes are used.
        loss, inputs, targets: as in `hocket.Trainer`. A loss counts if it computes products.
        depth: levels of modules to list; None for all.

    Raises:
        ValueError: the model has lazy modules without shapes, or reads values of tensors, so that shapes depend on them; or a
            layer, which the message names, does not take the batch.

    Example:
        >>> import torch, hocket
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> print(hocket.model_summary(model, (torch.ones(32, 8), torch.ones(32, 4)), loss="mse_loss"))
        module  type        output  calls  parameters  trainable  buffers  size   forward      backward
        ...
    """
    task = task_of(model, conversions.loss(loss), inputs, targets, None)
    if (batch is None and not _takes_steps(task)) or (isinstance(batch, tuple | list | Mapping) and not batch):
        raise WrongValue(
            f"batch={batch!r} has no tensors. Give a batch as training has it: next(iter(loader)), or tensors of its shapes, "
            "such as (torch.ones(32, 8), torch.zeros(32))."
        )
    return summarize(task, batch, depth=depth, backward=loss is not None or isinstance(model, Task))


def summarize(
    task: Task,
    batch: Any,
    *,
    depth: int | None = 3,
    backward: bool = True,
    convert: Callable[[Any], Any] = lambda batch: batch,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    hollow: Hollow | None = None,
) -> ModelSummary:
    """Return the summary of a task; see `model_summary`.

    Args:
        backward: whether the task has a loss.
        convert, context: what the precision does with a batch, and its context of a forward pass.
        hollow: the mode of the task's tensors, if they have no storage already.
    """
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise WrongValue(
            f"depth={depth!r} is not a number of levels. Give 1 or more, 0 for the total only, or None for all."
        )
    hollow = hollow or Hollow()
    model = task.model
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise WrongValue(
            f"{type(model).__name__}.{lazy[0]} has no shape yet: it is of a lazy layer, such as torch.nn.LazyLinear. Call the "
            "model once before: model(next(iter(loader))[0])."
        )
    device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
    with seeding.preserved():
        copied = _hollow_copy(task, hollow, device).train()
        held: dict[int, tuple[Tensor, Tensor]] = {}
        given = map_tensors(lambda tensor: hollow.view(tensor, held), batch)
        return _Run(copied, hollow).summary(given, depth, backward, convert, context, device)


def _takes_steps(task: Task) -> bool:
    """Whether a task has no forward pass, because it takes the steps itself."""
    return task.owns_steps and type(task).forward is Task.forward


def _hollow_copy(task: Task, hollow: Hollow, device: torch.device) -> Task:
    """Return a copy without storage, without hooks, and with full tensors in place of shards."""
    memo: dict[int, Any] = {}
    classes: dict[nn.Module, type[nn.Module]] = {}
    for module in task.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = type(value)()
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = hollow.like(tensor, device)
    try:
        for module in task.modules():
            if hasattr(type(module), "unshard"):  # of FSDP, which cannot be copied
                classes[module] = type(module)
                module.__class__ = next(each for each in type(module).__mro__ if not hasattr(each, "unshard"))
        return copy.deepcopy(task, memo)
    finally:
        for module, own in classes.items():
            module.__class__ = own


class _Run:
    """A step of a model without storage."""

    def __init__(self, task: Task, hollow: Hollow) -> None:
        self.task, self.model, self.hollow = task, task.model, hollow
        self.counter = FlopCounterMode(display=False, custom_mapping=FUSED)
        self.calls: Counter[nn.Module] = Counter()
        self.outputs: dict[nn.Module, tuple[tuple[int, ...], ...]] = {}
        self.forward: Counter[nn.Module] = Counter()
        self.operations = BackwardCounter(self.counter)
        self.backward: Counter[nn.Module] = Counter()
        self.notes: list[str] = []

    def summary(
        self, batch: Any, depth: int | None, backward: bool, convert: Any, context: Any, device: torch.device
    ) -> ModelSummary:
        if batch is None:
            self.notes.append(
                "Without forward(batch), there are no output shapes and FLOPs: train_batch takes the steps."
            )
            return ModelSummary(tuple(self._layers(depth)), tuple(self.notes))
        try:
            with quiet(), self.hollow, self._hooks(), self.counter, self.operations:
                with context():
                    outputs = self.task(convert(map_tensors(lambda tensor: tensor.to(device), batch)))
                if backward:
                    self._loss(outputs, batch, context)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise WrongValue(
                f"The summary of {type(self.model).__name__} needs the result of {error.func}, which depends on values, and "
                "it is computed from shapes only. Summarize the parts before and after it on their own."
            ) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, Mistake):
                raise
            shapes: list[str] = []
            map_tensors(lambda tensor: shapes.append(str(tuple(tensor.shape))), batch)
            tensors = f"tensors of shapes {', '.join(shapes)}" if shapes else "no tensors"
            advice = f"The batch has {tensors}: give another, or change the model."
            raise WrongValue(raised(self._raising(error), error, advice)) from error
        return ModelSummary(tuple(self._layers(depth)), tuple(self.notes))

    def _raising(self, error: BaseException) -> str:
        """Return the name of the module in whose forward pass an exception was raised."""
        names = {module: name for name, module in self.model.named_modules()}
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inner = [each for each in callers if isinstance(each, nn.Module) and each in names]
        if not inner:
            return "The loss" if self.calls[self.model] else "The forward pass"
        model, layer = type(self.model).__name__, type(inner[-1]).__name__
        return f"{model}.{names[inner[-1]]} ({layer})" if names[inner[-1]] else model

    def _loss(self, outputs: Any, batch: Any, context: Any) -> None:
        before = self.counter.get_total_flops(), self.operations.flops
        try:
            with context():
                self.task.loss(outputs, batch)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.notes.append("The loss depends on values and is not counted.")
        self.forward[self.model] += self.counter.get_total_flops() - before[0]
        self.backward[self.model] += self.operations.flops - before[1]

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Record the calls of modules."""
        started: list[tuple[int, int]] = []

        def before(module: nn.Module, inputs: Any) -> None:
            started.append((self.counter.get_total_flops(), self.operations.flops))

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            flops, backward = started.pop()
            self.calls[module] += 1
            self.forward[module] += self.counter.get_total_flops() - flops
            self.backward[module] += self.operations.flops - backward
            if module not in self.outputs:
                shapes: list[tuple[int, ...]] = []
                map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)), outputs)
                self.outputs[module] = tuple(shapes)

        handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layers(self, depth: int | None) -> Iterator[Layer]:
        for name, module in self.model.named_modules():
            if depth is not None and name and name.count(".") >= depth:
                continue
            parameters, buffers = list(module.parameters()), list(module.buffers())
            yield Layer(
                name=name,
                kind=type(module).__name__,
                outputs=self.outputs.get(module, ()),
                calls=self.calls[module],
                parameters=sum(each.numel() for each in parameters),
                trainable=sum(each.numel() for each in parameters if each.requires_grad),
                buffers=sum(each.numel() for each in buffers),
                bytes=sum(each.nbytes for each in [*parameters, *buffers]),
                forward_flops=self.forward[module],
                backward_flops=self.backward[module],
            )


def of_state(state: State, batch: Any, depth: int | None = 3, hollow: Hollow | None = None) -> ModelSummary:
    """Return the summary of a run's model, as its task and precision compute it."""
    task = state.task
    if _takes_steps(task):
        return summarize(task, None, depth=depth)
    return summarize(
        task,
        batch,
        depth=depth,
        backward=type(task).loss is not Task.loss,
        convert=state.bus.convert_batch,
        context=state.bus.forward_context,
        hollow=hollow,
    )


class ShowSummary(Callback):
    """Shows the summary of the model once, when the first batch has been loaded."""

    def __init__(self) -> None:
        self._shown = False

    @classmethod
    def attachment(cls) -> Attachment:
        """Return it as an attached plug-in."""
        return Attachment("callbacks", "model-summary", cls())

    def batch_start(self, state: State) -> None:
        """Show it on rank 0."""
        if self._shown or state.strategy.rank:
            return
        self._shown = True
        batch = state.batch.batches[0] if isinstance(state.batch, Window) else state.batch
        try:
            lines = str(of_state(state, batch)).splitlines()
        except Exception as error:
            warn(f"The model cannot be summarized: {error}")
            return
        if state.bus.listeners("log_summary"):
            state.bus.log_summary(state, lines)
        else:
            print("\n".join(lines), flush=True)
