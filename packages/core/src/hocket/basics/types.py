"""What users may pass, and what data may be: aliases for signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

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
#: A plug-in: its name, ``{"name": {"argument": value}}``, its class, or an instance, which may be any object with hooks.
PluginLike: TypeAlias = "str | Mapping[str, Any] | type | object"


class Metric(Protocol):
    """A metric of an evaluation set or of training, such as one of torchmetrics."""

    @property
    def update(self) -> Callable[..., object]:
        """Add a batch: ``update(outputs, targets)``."""

    @property
    def compute(self) -> Callable[[], Any]:
        """Return the value, or several by name."""

    @property
    def reset(self) -> Callable[[], object]:
        """Forget everything."""


#: The location of a part of a batch or of the outputs: a name, an index, or a function that returns it.
PartLike: TypeAlias = "str | int | Callable[[Any], Any]"
#: One metric: its name, its class, itself, or a function that makes it.
OneMetric: TypeAlias = "str | Metric | Callable[[], Metric]"
#: Metrics by name, a list of metrics, one metric, or a function that makes them.
MetricsLike: TypeAlias = "OneMetric | Sequence[OneMetric] | Mapping[str, OneMetric] | Callable[[], MetricsLike]"
#: An optimizer, a function of the list of parameters that returns one, or a name or configuration.
OneOptimizer: TypeAlias = "Optimizer | Callable[[list[nn.Parameter]], Optimizer] | str | Mapping[str, Any]"
#: One optimizer, several, or several by name.
OptimizerLike: TypeAlias = "OneOptimizer | Sequence[OneOptimizer] | Mapping[str, OneOptimizer]"
#: A schedule's name or configuration, a function of a `hocket.schedules.Clock`, or one of the optimizer that returns a torch
#: scheduler.
OneSchedule: TypeAlias = "str | Mapping[str, Any] | Callable[[Clock], float] | Callable[[Optimizer], Any] | Any"
#: One schedule for all optimizers, one for each, or some by the names of optimizers.
ScheduleLike: TypeAlias = "OneSchedule | Sequence[OneSchedule] | Mapping[str, OneSchedule]"
