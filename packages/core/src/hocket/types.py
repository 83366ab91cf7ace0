"""What users may pass, and what data may be: aliases for signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hocket.schedules import Clock

#: A batch is whatever the loader yields: tensors, in any nesting of sequences and mappings, or objects of the user's own.
Batch: TypeAlias = Any
#: Where something is in a batch: a name, an index, or a function of the batch; None for the usual place.
Where: TypeAlias = "str | int | Callable[[Batch], Any] | None"
#: A function of a batch that returns a batch, or several, which are called in order.
Transforms: TypeAlias = "Callable[[Batch], Batch] | Sequence[Callable[[Batch], Batch]]"
#: The same for all batches, or for those of ``"train"`` and ``"eval"``.
BatchTransformLike: TypeAlias = "Transforms | Mapping[str, Transforms]"
#: A plug-in: its name, ``{"name": {"argument": value}}`` or an instance.
PluginLike: TypeAlias = Any
#: Metrics by name, a list of metrics, one metric, or a function that makes them; a metric may be a name or a class.
MetricsLike: TypeAlias = Any
#: An optimizer, a function of the list of parameters that returns one, or a name or configuration.
OneOptimizer: TypeAlias = "Optimizer | Callable[[list[nn.Parameter]], Optimizer] | str | Mapping[str, Any]"
#: One optimizer, several, or several by name.
OptimizerLike: TypeAlias = "OneOptimizer | Sequence[OneOptimizer] | Mapping[str, OneOptimizer]"
#: A schedule's name or configuration, a function of a `hocket.schedules.Clock`, or one of the optimizer that returns a torch
#: scheduler.
OneSchedule: TypeAlias = "str | Mapping[str, Any] | Callable[[Clock], float] | Callable[[Optimizer], Any] | Any"
#: One schedule for all optimizers, one for each, or some by the names of optimizers.
ScheduleLike: TypeAlias = "OneSchedule | Sequence[OneSchedule] | Mapping[str, OneSchedule]"
