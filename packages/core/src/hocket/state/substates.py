"""Parts of the state that the Trainer sets up: the run's identity, its data, what optimizes it, and its logged values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from hocket.basics.history import Recorder
from hocket.help import attributes
from hocket.state.aggregates import Aggregates
from hocket.state.watching import WatchedValues

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hocket.basics.losses import Loss, Reduction
    from hocket.basics.run_folder import Run, RunFolder
    from hocket.basics.time import Interval
    from hocket.basics.types import Batch
    from hocket.data.source import Source
    from hocket.state.metrics import MetricSet
    from hocket.state.state import State
    from hocket.surgery import Replacement

#: Kind and threshold of gradient clipping.
Clipping: TypeAlias = tuple[Literal["norm", "value", "adaptive"], float]


@dataclass(slots=True)
class Identity:
    """Which run it is, and which run it continues. Resuming replaces the run and its folder."""

    run: Run
    #: The folder of this run, which is created when it is claimed.
    folder: RunFolder
    #: The Trainer's ``resume`` argument.
    resumes: str | Path | None = None
    #: The path or URL of the checkpoint that the run resumed from, until its first fit has shown it.
    resumed_from: str | None = None
    #: The resolved configuration file of the run, as text, if the command line started it.
    config: str | None = None


class EvaluationSet(Protocol):
    """An evaluation set as this rank evaluates it; see `hocket.loop.evaluate.PreparedSet`."""

    #: The data as the user gave it, and its source.
    data: Any
    source: Source
    metrics: MetricSet
    #: When it is evaluated during a fit; and at most how many of its batches, or which fraction of them.
    every: Interval
    limit: int | None

    def weighted(self, state: State, label: str, loss: Loss, precise: dtype) -> Tensor:
        """Return the sum of the loss over the batch and its weight, as a vector of two numbers."""


@dataclass(slots=True, eq=False)
class Data:
    """The data of a run; `hocket.State` has these under the same names."""

    #: The training data as the user gave it, and as this rank iterates it.
    train_data: Iterable[Batch] | None = None
    train_loader: Iterable[Batch] | None = None
    #: Evaluation sets by label.
    eval_sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    #: Methods of the training-data iterator: `indices`, `is_last` and `another_epoch`, which is None without data.
    sample_indices: Callable[[], list[Any] | None] = lambda: None
    is_last_batch: Callable[[], bool] = lambda: False
    another_epoch: Callable[[], AbstractContextManager[Iterator[tuple[Batch, bool]]]] | None = None


class LearningRate(Protocol):
    """Sets the learning rates of one optimizer."""

    def start(self, state: State) -> None:
        """Set the learning rates for ``state.timestamp``, as a fit begins."""

    def step(self, state: State) -> None:
        """Update the learning rates after a step: ``state.timestamp`` already counts the batch.

        ``state.step.taken`` says which optimizers have stepped, and how often.
        """

    def epoch_end(self, state: State) -> None:
        """Update the learning rates after an epoch: ``state.timestamp`` already counts it."""

    def measured(self, state: State, names: Collection[str]) -> None:
        """Update the learning rates after an evaluation, or at the end of an epoch.

        Args:
            names: the metrics that were computed just now, with values in ``state.metrics``.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, besides the learning rates themselves, which optimizers save."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""


@dataclass(slots=True, eq=False)
class Optimization:
    """The parameters of a run and what changes them; `hocket.State` has these under the same names."""

    #: All parameters whose gradients a step computes, whether in an optimizer or not.
    parameters: list[Parameter] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    #: The names of the optimizers, in the same order: given by the user, else numbers.
    optimizer_names: list[str] = field(default_factory=list)
    schedules: list[LearningRate] = field(default_factory=list)
    #: Kind and threshold of gradient clipping, or None.
    clipping: Clipping | None = None
    #: Replacements by surgery so far; algorithms append to it, so that optimizers are updated.
    replacements: list[Replacement] = field(default_factory=list)
    #: What losses that do not declare it are over; None for means over samples, which is checked.
    loss_reduction: Reduction | None = None


class LoggedValues:
    """The values that a run has logged and measured; `hocket.State` has these under the same names."""

    def __init__(self, state: State) -> None:
        #: Values logged since the last logging interval ended: numbers, and scalar tensors still on their device.
        self.logged: dict[str, float | Tensor] = {}
        #: Values logged with a reduction, until the end of their interval, epoch or evaluation set.
        self.aggregates = Aggregates(state)
        #: All values that were passed to the loggers so far, for `hocket.Result.history`.
        self.history = Recorder()
        #: Logged values that plug-ins act on, such as early stopping.
        self.watched = WatchedValues()
        #: The latest evaluation results, as ``label/name``.
        self.metrics: dict[str, float] = attributes.Values()

    def without_logged(self) -> LoggedValues:
        """Return a copy for another thread, whose results do not change as training continues."""
        taken = copy.copy(self)
        taken.logged, taken.metrics = {}, dict(self.metrics)
        return taken
