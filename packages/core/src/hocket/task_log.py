"""How a Task logs values: its connection to the run, which exists while a Trainer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hocket.data.nesting import map_tensors
from hocket.errors import WrongState, WrongType
from hocket.help import logged as help_logged
from hocket.help.objects import short

if TYPE_CHECKING:
    from hocket.training.accumulators import Reduce
    from hocket.training.aggregates import Aggregates, Over

_MISSING: Any = object()
F = TypeVar("F", bound=Callable[..., Any])


def _unless_theirs(method: F) -> F:
    """Make a method a property: an attribute, submodule, parameter or buffer that a task has by its name comes first."""
    name = method.__name__

    def getter(task: Any) -> Any:
        for theirs in (task.__dict__, task._modules, task._parameters, task._buffers):
            if theirs.get(name) is not None:
                return theirs[name]
        return MethodType(method, task)

    def setter(task: Any, value: Any) -> None:
        task.__dict__[name] = value

    def deleter(task: Any) -> None:
        del task.__dict__[name]

    return cast("F", property(getter, setter, deleter, method.__doc__))


class LogsValues(nn.Module):
    """The part of `hocket.Task` that logs values."""

    #: Takes the values; None outside of a run. Copies of the task have None.
    _aggregates: Aggregates | None = None

    @_unless_theirs
    def log(
        self,
        name: str | Mapping[str, Any],
        value: Any = _MISSING,
        *,
        reduce: Reduce | None = None,
        over: Over = "interval",
        weight: float | Tensor | None = None,
        **others: Any,
    ) -> None:
        """Log a value, or several by name, from any method of the task: ``train/name``, and ``label/name`` in an evaluation.

        Values are reduced over microbatches, batches and ranks, in training to the end of the logging interval, and in an
        evaluation over the set. Tensors stay on their device until then. Padding does not count. What computes a batch again
        (SAM, LBFGS, activation checkpointing, ``microbatch="auto"``) does not count again; nor does prediction.

        Args:
            name: a text, or a mapping of names to values.
            value: a number, a tensor of one element, or a metric with ``update``, ``compute`` and ``reset``, which you update.
            reduce: ``"mean"`` (None), ``"sum"``, ``"min"``, ``"max"``, ``"last"``; ``"metric"`` (None) for a metric.
            over: ``"interval"``, ``"epoch"``, or both as a tuple: the value of the epoch is then ``train/name/epoch``.
            weight: of a mean, such as a number of tokens; by default the number of samples that the method was given.

        Raises:
            RuntimeError: called outside of a run.
            TypeError: the value is not a single number, or a name not a text.
            ValueError: the reduction is unknown, or the name is that of something else, such as the loss.

        Example:
            >>> import hocket, torch
            >>> class Classifier(hocket.Task):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layer = torch.nn.Linear(4, 3)
            ...     def forward(self, batch):
            ...         return self.layer(batch[0])
            ...     def loss(self, outputs, batch):
            ...         self.log("accuracy", (outputs.argmax(1) == batch[1]).float().mean())
            ...         return torch.nn.functional.cross_entropy(outputs, batch[1])
            >>> data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 10
            >>> trainer = hocket.Trainer(
            ...     Classifier(), data, eval_data={"test": data}, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu"
            ... )
            >>> sorted(trainer.fit().metrics)
            ['test/accuracy', 'test/loss', 'train/accuracy', 'train/loss']
        """
        if torch.compiler.is_compiling():  # the compiled graph ends here, and continues after the call
            return _uncompiled(self, name, value, reduce, over, weight, others)
        _log(self, name, value, reduce, over, weight, others)

    # torch refuses a parameter, buffer or module by the name of a method; theirs counts.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `torch.nn.Module.register_parameter`."""
        if name == "log":
            self._parameters.setdefault(name, None)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """See `torch.nn.Module.register_buffer`."""
        if name == "log":
            self._buffers.setdefault(name, None)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See `torch.nn.Module.add_module`."""
        if name == "log":
            self._modules.setdefault(name, None)
        super().add_module(name, module)


def _log(
    task: LogsValues, name: Any, value: Any, reduce: Any, over: Any, weight: Any, others: Mapping[str, Any]
) -> None:
    if others:
        raise help_logged.foreign(others, "self.log(…)")
    if type(name) is str:
        if value is _MISSING:
            raise WrongType(f"self.log({name!r}) was given no value. Write self.log({name!r}, value).")
        values: Any = {name: value}
    elif isinstance(name, Mapping):
        if value is not _MISSING:
            raise WrongType("self.log takes a name and a value, or a mapping alone. Write self.log({'name': value}).")
        values = name
    else:
        raise WrongType(
            f"self.log was given {short(name)}. Write self.log('name', value), or self.log({{'name': value}})."
        )
    aggregates = task._aggregates
    if aggregates is None:
        raise WrongState(help_logged.outside(type(task).__name__))
    aggregates.log(values, reduce, over, weight, True)


def _uncompiled(*arguments: Any) -> None:
    torch.compiler.disable(_log_copies)(*arguments)


def _log_copies(task: LogsValues, *arguments: Any) -> None:
    _log(task, *map_tensors(torch.clone, arguments))  # a CUDA graph would overwrite the values before they are read


@contextmanager
def connected(task: nn.Module, aggregates: Aggregates) -> Iterator[None]:
    """Let a task, and the tasks inside it, log values inside the context."""
    tasks = [each for each in task.modules() if isinstance(each, LogsValues)]
    before = [vars(each).get("_aggregates") for each in tasks]
    for each in tasks:
        vars(each)["_aggregates"] = aggregates
    try:
        yield
    finally:
        for each, outer in zip(tasks, before, strict=True):
            if outer is None:
                vars(each).pop("_aggregates", None)
            else:
                vars(each)["_aggregates"] = outer
