"""How a Task logs values: its connection to the run, which exists while a Trainer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hocket.basics.short_repr import short
from hocket.data.nesting import map_tensors
from hocket.errors import WrongState, WrongType
from hocket.state import log_names

if TYPE_CHECKING:
    from hocket.state.accumulators import Over, Reduce

_MISSING: Any = object()


class Collects(Protocol):
    """What collects the values that tasks log: `hocket.state.aggregates.Aggregates`."""

    def log(self, values: Any, reduce: Reduce | None, over: Over, weight: float | Tensor | None, of_task: bool) -> None:
        """Add values by name."""


class LogsValues(nn.Module):
    """The part of `hocket.Task` that logs values."""

    #: Takes the values; None outside of a run. Copies of the task have None.
    _aggregates: Collects | None = None

    def log(
        self,
        name: str | Mapping[str, Any],
        value: object = _MISSING,
        *,
        reduce: Reduce | None = None,
        over: Over = "interval",
        weight: float | Tensor | None = None,
        **others: object,
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


def _log(
    task: LogsValues,
    name: str | Mapping[str, Any],
    value: object,
    reduce: Reduce | None,
    over: Over,
    weight: float | Tensor | None,
    others: Mapping[str, object],
) -> None:
    if others:
        raise log_names.foreign(others, "self.log(…)")
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
        raise WrongState(log_names.outside(type(task).__name__))
    aggregates.log(values, reduce, over, weight, True)


def _uncompiled(*arguments: object) -> None:
    torch.compiler.disable(_log_copies)(*arguments)


def _log_copies(task: LogsValues, *arguments: Any) -> None:
    _log(task, *map_tensors(torch.clone, arguments))  # a CUDA graph would overwrite the values before they are read


@contextmanager
def connected(task: nn.Module, aggregates: Collects) -> Iterator[None]:
    """Let a task, and the tasks inside it, log values inside the context."""
    tasks = [module for module in task.modules() if isinstance(module, LogsValues)]
    before = [vars(inner).get("_aggregates") for inner in tasks]
    for inner in tasks:
        vars(inner)["_aggregates"] = aggregates
    try:
        yield
    finally:
        for inner, outer in zip(tasks, before, strict=True):
            if outer is None:
                vars(inner).pop("_aggregates", None)
            else:
                vars(inner)["_aggregates"] = outer
