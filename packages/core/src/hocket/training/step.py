"""One optimizer step: its batch and its results."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.data.batches import Counts
from hocket.data.nesting import map_tensors
from hocket.data.reading import How, samples_of_part
from hocket.errors import WrongState, WrongValue
from hocket.task import Task

if TYPE_CHECKING:
    from hocket.state import State
    from hocket.training.divisors import Divisors
    from hocket.training.metrics import MetricSet
    from hocket.types import Batch


class Step:
    """The current batch and the results computed from it.

    Training has one, as does each step of a `hocket.Task.train_batch`, each evaluation and each prediction.
    """

    __slots__ = (
        "added", "batch", "boundary", "carry", "composed", "counts", "divided", "divisor", "gradient_norm", "inputs", "kept",
        "loss", "loss_function", "loss_names", "losses", "metrics", "name", "optimizers", "others", "outputs", "part", "parts",
        "retain_graph", "samples", "seen", "taken", "trained_on", "tried", "weight_of",
    )  # fmt: skip

    def __init__(self) -> None:
        #: The batch (the events say when it is the full batch, a microbatch, or on the device), and the model's outputs.
        self.batch: Batch = None
        self.outputs: Any = None
        #: The mean loss of the current microbatch, with its graph; from after_train_batch on that of the batch, detached.
        self.loss: torch.Tensor | None = None
        #: The named losses that ``loss`` is the sum of, from after_train_batch on.
        self.losses: Mapping[str, torch.Tensor] = {}
        #: Gradient norm before clipping, if clipping by norm computed it: a scalar on the device.
        self.gradient_norm: torch.Tensor | None = None
        #: Samples and tokens of the batch as the loader returned it, over all ranks.
        self.counts = Counts(0)
        #: Number of real samples in the current batch on this rank, 0 for a padding batch; and on all ranks together.
        self.samples = 0
        self.trained_on = 0
        #: Number of optimizer steps to take on the batch, each on a part of it; see `State.request_steps`.
        self.parts = 1
        #: The number of the current part, from 0.
        self.part = 0
        #: Updated with the outputs; None if there are none, or while the gradients of the batch are recomputed.
        self.metrics: MetricSet | None = None
        #: The loss names that ranks agreed on; None before the first batch, and for a single rank.
        self.loss_names: Sequence[str] | None = None
        #: The weight of a loss that comes without one, as a function of the batch; None until it is needed.
        self.weight_of: Callable[[Any], torch.Tensor | None] | None = None
        #: Whether the batch is one of several parts, over microbatches, ranks or an evaluation, whose losses need weights; and
        #: whether the last loss is more than a mean over labels of the outputs. See `hocket.training.divisors`.
        self.divided = False
        self.composed = False
        #: What the last loss is divided by, if that is written by hand.
        self.divisor: float | torch.Tensor | None = None
        #: What watches the calls of the current loss.
        self.seen: Divisors | None = None
        #: The number of divided batches since the loss was tried; 0 if it is not to be tried again.
        self.tried = 0
        #: The number of divided microbatches to whose loss plug-ins added something.
        self.added = 0

        # Only for the steps of `hocket.Task.train_batch` and `hocket.Runtime.stepper`; see `hocket.training.steps`.
        #: The names of its optimizers, joined by "+"; "" for all of them.
        self.name = ""
        #: The optimizers that it steps, None for all; and the trained parameters of the others, which get no gradients.
        self.optimizers: Sequence[torch.optim.Optimizer] | None = None
        self.others: Sequence[torch.nn.Parameter] = ()
        #: The loss as a function of a microbatch; None for the model's forward pass and then the task's loss.
        self.loss_function: Callable[..., Any] | None = None
        #: The loss function's second argument, as a tuple of none or one; and what it kept of each microbatch.
        self.carry: tuple[Any, ...] = ()
        self.kept: list[Any] = []
        #: The leaves that replace tensors with a graph in the batch; see `Boundary`.
        self.boundary: Boundary | None = None
        #: The ``inputs`` of the next backward, None for all leaves; and whether to retain the graph.
        self.inputs: Sequence[torch.Tensor] | None = None
        self.retain_graph = False

        #: Number of steps of each optimizer in the batch, by id; None if all of them step once.
        self.taken: Mapping[int, int] | None = None

    def without_batch(self) -> Step:
        """Return a copy without tensors: the counts and settings only."""
        copied = copy.copy(self)
        copied.batch = copied.outputs = copied.loss = copied.gradient_norm = copied.divisor = None
        copied.losses = {}
        return copied


class Boundary:
    """Replace the tensors of a batch that have a graph by leaves.

    The backward of each microbatch ends at the leaves, so that the graph, which all microbatches have in common, is
    traversed only once.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._leaves: list[torch.Tensor] = []
        self._versions: list[int] = []
        #: Whether backward has traversed the graph, which frees it.
        self._traversed = False

    @classmethod
    def of(cls, batch: Batch) -> tuple[Any, Boundary | None]:
        """Return the batch with leaves, and its boundary, or None if no tensor has a graph."""
        boundary = cls()
        with_leaves = map_tensors(boundary._leaf, batch)
        return (with_leaves, boundary) if boundary._tensors else (batch, None)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        self._leaves.append(tensor.detach().requires_grad_())
        return self._leaves[-1]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The original tensors, with their graphs."""
        return self._tensors

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaves that replace them in microbatches."""
        return self._leaves

    def begin(self) -> None:
        """Prepare for computing the gradients of the batch. Raises RuntimeError if they were computed before."""
        if self._traversed:
            raise WrongState(
                "The batch of this step has a tensor that was computed before with gradients, and its graph can be used only "
                "once. SAM, LBFGS and a smaller microbatch after a memory error compute gradients again. Compute that tensor "
                "in the loss function instead, or detach it."
            )
        for leaf in self._leaves:
            leaf.grad = None

    def backward(self) -> None:
        """Backpropagate the accumulated gradients of the leaves into the original tensors."""
        self._traversed = True
        pairs = [(tensor, leaf.grad) for tensor, leaf in zip(self._tensors, self._leaves, strict=True)]
        reached = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if reached:
            tensors, gradients = zip(*reached, strict=True)
            try:
                torch.autograd.backward(tensors, gradients)
            except RuntimeError as error:
                changed = [tensor._version for tensor in self._tensors] != self._versions
                error.add_note(CHANGED_IN_PLACE if changed else _TRAVERSED)
                raise


#: Why torch raised an error, if the batch has a tensor with a graph.
CHANGED_IN_PLACE = (
    "A tensor in the batch of this step was computed before the step with gradients, and changed in place later. Compute a new "
    "tensor from it instead, such as fake = fake.clamp(0, 1) for fake.clamp_(0, 1), or fake = fake.clone() before the change."
)
_TRAVERSED = (
    "A tensor in the batch of this step was computed before the step with gradients. If another step uses its graph too, "
    "detach it in one of them, as in step(loss_function, {'fake': fake.detach()}, …)."
)


def count_part(state: State, part: Batch, how: How | None) -> int:
    """Return the number of samples in a part of the batch that ``how`` is about; see `hocket.data.reading.how_divided`."""
    if how is None or type(state.task).count is not Task.count:
        return count(state, part).samples
    return samples_of_part(part, how)


def count(state: State, batch: Batch) -> Counts:
    """Return the task's count of samples and tokens in a batch. Raises ValueError if it is not a valid count."""
    counted = state.task.count(batch)
    if isinstance(counted, Counts):
        return counted
    try:
        if isinstance(counted, torch.Size):  # which is a tuple of integers
            raise TypeError
        counts = Counts(*map(operator.index, counted if isinstance(counted, tuple) else (counted,)))
    except TypeError:
        counts = Counts(-1)
    if min(counts) < 0:
        raise WrongValue(
            f"count(batch) of {type(state.task).__name__} returned {counted!r}. It returns the number of samples, or (samples, "
            "tokens): integers, 0 or more, such as len(batch[0])."
        )
    return counts
