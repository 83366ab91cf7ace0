"""One step of the optimizers: the batch that it takes, and what came of it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.data.batches import Counts, map_tensors

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.training.metrics import MetricSet


class Step:
    """The current batch and what came of it. Training has one, as has each step of a `hocket.Task.train_batch`; evaluations
    and predictions have one each."""

    __slots__ = (
        "batch", "boundary", "carry", "counts", "gradient_norm", "inputs", "kept", "loss", "loss_function", "loss_names",
        "losses", "metrics", "name", "optimizers", "others", "outputs", "retain_graph", "samples", "taken", "trained_on",
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

        # What only the steps of a `hocket.Task.train_batch` have; see `hocket.training.steps`.
        #: The names of its optimizers, joined by "+"; "" for all of them.
        self.name = ""
        #: Those that it steps, None for all; and the trained parameters of the others, which get no gradients.
        self.optimizers: Sequence[torch.optim.Optimizer] | None = None
        self.others: Sequence[torch.nn.Parameter] = ()
        #: The loss as a function of a microbatch; None for the model's forward pass and then the task's loss.
        self.loss_function: Callable[..., Any] | None = None
        #: What the loss function is given besides the microbatch, nothing or one thing; and what it kept of each microbatch.
        self.carry: tuple[Any, ...] = ()
        self.kept: list[Any] = []
        #: Where graphs of tensors in the batch end; see `Boundary`.
        self.boundary: Boundary | None = None
        #: What the next backward pass accumulates gradients in, None for everything; and whether the graph is used again.
        self.inputs: Sequence[torch.Tensor] | None = None
        self.retain_graph = False

        #: How often each optimizer has stepped in the batch, by id; None where all of them step once.
        self.taken: Mapping[int, int] | None = None

    def without_batch(self) -> Step:
        """A copy of the numbers alone."""
        taken = copy.copy(self)
        taken.batch = taken.outputs = taken.loss = taken.gradient_norm = None
        taken.losses = {}
        return taken


class Boundary:
    """Leaves in place of the tensors of a batch that have a graph, so that each microbatch ends there and the graph, which
    they share, is passed once."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._leaves: list[torch.Tensor] = []
        self._passed = False

    @classmethod
    def of(cls, batch: Any) -> tuple[Any, Boundary | None]:
        """The batch with leaves, and its boundary; None if no tensor has a graph."""
        boundary = cls()
        cut = map_tensors(boundary._leaf, batch)
        return (cut, boundary) if boundary._tensors else (batch, None)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        self._tensors.append(tensor)
        self._leaves.append(tensor.detach().requires_grad_())
        return self._leaves[-1]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Those with a graph."""
        return self._tensors

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """What microbatches are made of instead."""
        return self._leaves

    def begin(self) -> None:
        """Before the gradients of the batch are computed. Raises RuntimeError if that is not possible, again."""
        if self._passed:
            raise RuntimeError(
                "The batch of this step has a tensor that was computed in train_batch with gradients, which cannot be "
                "computed again, and SAM, LBFGS and a smaller microbatch after a memory error compute gradients again. "
                "Compute that tensor in the loss function instead, or detach it."
            )
        for leaf in self._leaves:
            leaf.grad = None

    def backward(self) -> None:
        """Pass on the gradients of all microbatches."""
        self._passed = True
        pairs = [(tensor, leaf.grad) for tensor, leaf in zip(self._tensors, self._leaves, strict=True)]
        reached = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if reached:
            tensors, gradients = zip(*reached, strict=True)
            torch.autograd.backward(tensors, gradients)


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
