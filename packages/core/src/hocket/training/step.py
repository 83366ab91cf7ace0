"""One step of the optimizers: the batch that it takes, and what came of it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.data.batches import Counts

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.training.metrics import MetricSet


class Step:
    """The batch under way and what came of it. Training has one; evaluations and predictions have one each."""

    __slots__ = (
        "batch", "counts", "gradient_norm", "loss", "loss_names", "losses", "metrics", "outputs", "samples", "trained_on",
        "weight_of",
    )  # fmt: skip

    def __init__(self) -> None:
        #: The batch (see the events for when it is whole, a microbatch, or on the device), and the model's outputs for it.
        self.batch: Any = None
        self.outputs: Any = None
        #: The mean loss of the microbatch under way, with its graph; after_train_batch and later: of the batch, detached.
        self.loss: torch.Tensor | None = None
        #: The named losses that ``loss`` is the sum of, from after_train_batch on.
        self.losses: Mapping[str, torch.Tensor] = {}
        #: Norm of the gradients before clipping, where clipping by norm computed it: a scalar on the device.
        self.gradient_norm: torch.Tensor | None = None
        #: Samples and tokens of the batch as it was handed out, over all ranks.
        self.counts = Counts(0)
        #: Samples that this rank trains on, 0 where it only keeps the others company; and all ranks together.
        self.samples = 0
        self.trained_on = 0
        #: Shown the outputs; None where the gradients of the batch are computed again.
        self.metrics: MetricSet | None = None
        #: The names in ``losses`` that ranks have agreed on; None before the first batch, and where there is one rank.
        self.loss_names: Sequence[str] | None = None
        #: How losses without a weight are weighted, as a function of the batch; None until that matters.
        self.weight_of: Callable[[Any], torch.Tensor | None] | None = None

    def without_batch(self) -> Step:
        """A copy of the numbers alone."""
        taken = copy.copy(self)
        taken.batch = taken.outputs = taken.loss = taken.gradient_norm = None
        taken.losses = {}
        return taken


def count(state: State, batch: Any) -> Counts:
    """What the task says that a batch counts for."""
    counted = state.task.count(batch)
    if isinstance(counted, Counts):
        return counted
    try:
        counts = Counts(*map(operator.index, counted if isinstance(counted, tuple) else (counted,)))
    except TypeError:
        counts = Counts(-1)
    if min(counts) < 0:
        raise ValueError(
            f"count(batch) of {type(state.task).__name__} returned {counted!r}. It returns the number of samples, or (samples, "
            "tokens): integers, 0 or more, such as len(batch[0])."
        )
    return counts
