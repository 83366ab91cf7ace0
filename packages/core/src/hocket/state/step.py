"""One optimizer step: its batch and its results."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.data.batches import Counts
from hocket.data.nesting import map_tensors
from hocket.data.reading import How, samples_of_part
from hocket.errors import WrongState, WrongValue
from hocket.state.known_weights import KnownWeights
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.loss_divisors import LossWatch
    from hocket.state.metrics import MetricSet
    from hocket.state.state import State


class Step:
    """The current batch and the results computed from it. Training has one, as does each evaluation and each prediction.

    The values of the class are those of a `UserStep` in every other step, where they cannot be set.
    """

    __slots__ = (
        "batch", "counts", "gradient_norm", "loss", "losses", "metrics", "optimizers", "outputs", "part", "requested_steps",
        "samples", "taken", "trained_on", "watch", "weighing",
    )  # fmt: skip

    name: str = ""
    others: Sequence[nn.Parameter] = ()
    loss_function: Callable[..., Any] | None = None
    carry: tuple[Any, ...] = ()
    boundary: Boundary | None = None
    losses_apart: Mapping[str, Tensor] | None = None
    inputs: Sequence[Tensor] | None = None
    retain_graph: bool = False

    def __init__(self) -> None:
        #: The batch (the events say when it is the full batch, a microbatch, or on the device), and the model's outputs.
        self.batch: Batch = None
        self.outputs: Any = None
        #: The mean loss of the current microbatch, with its graph; from after_train_batch on that of the batch, detached.
        self.loss: Tensor | None = None

        # From after_train_batch on:
        #: The named losses that ``loss`` is the sum of.
        self.losses: Mapping[str, Tensor] = {}
        #: Gradient norm before clipping, if clipping by norm computed it: a scalar on the device.
        self.gradient_norm: Tensor | None = None

        # For one batch of training:
        #: Samples and tokens of the batch as the loader returned it, over all ranks.
        self.counts = Counts(0)
        #: Number of real samples in the current batch on this rank, 0 for a padding batch; and on all ranks together.
        self.samples = 0
        self.trained_on = 0
        #: Number of optimizer steps to take on the batch, each on a part of it; see `State.request_steps`.
        self.requested_steps = 1
        #: The number of the current part, from 0.
        self.part = 0
        #: Updated with the outputs; None if there are none, or while the gradients of the batch are recomputed.
        self.metrics: MetricSet | None = None
        #: The optimizers that the step is of, None for all; and how often each has stepped in the batch, by id, None if all of
        #: them step once.
        self.optimizers: Sequence[torch.optim.Optimizer] | None = None
        self.taken: Mapping[int, int] | None = None

        # Of the losses:
        #: What watches the current loss, if it needs a weight: if the batch is divided into microbatches or over ranks, and
        #: in evaluation. None otherwise.
        self.watch: LossWatch | None = None
        #: What is known of their weights.
        self.weighing = KnownWeights()

    def without_batch(self) -> Step:
        """Return a copy without tensors: the counts and settings only."""
        copied = copy.copy(self)
        copied.batch = copied.outputs = copied.loss = copied.gradient_norm = copied.watch = None
        copied.losses = {}
        return copied


class UserStep(Step):
    """A step that the user's code takes, in `hocket.Task.train_batch` or a loop of `hocket.Runtime`, with some optimizers."""

    __slots__ = (
        "boundary", "carry", "inputs", "kept", "loss_function", "losses_apart", "name", "others", "retain_graph",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        super().__init__()
        #: The names of its optimizers, joined by "+"; "" for all of them.
        self.name = name
        #: The trained parameters of the other optimizers, which get no gradients.
        self.others = ()
        #: The loss as a function of a microbatch; None for the model's forward pass and then the task's loss.
        self.loss_function = None
        #: The loss function's second argument, as a tuple of none or one; and what it kept of each microbatch.
        self.carry = ()
        self.kept: list[Any] = []
        #: The losses of the `hocket.Apart` that the loss function returned last; None if it was another loss.
        self.losses_apart = None
        #: The leaves that replace tensors with a graph in the batch; see `Boundary`.
        self.boundary = None
        #: The ``inputs`` of the next backward, None for all leaves; and whether to retain the graph.
        self.inputs = None
        self.retain_graph = False


class Boundary:
    """Replace the tensors of a batch that have a graph by leaves.

    The backward of each microbatch ends at the leaves, so that the graph, which all microbatches have in common, is
    traversed only once.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._versions: list[int] = []
        #: Whether backward has traversed the graph, which frees it.
        self._traversed = False

    @classmethod
    def of(cls, batch: Batch) -> tuple[Any, Boundary | None]:
        """Return the batch with leaves, and its boundary, or None if no tensor has a graph."""
        boundary = cls()
        with_leaves = map_tensors(boundary._leaf, batch)
        return (with_leaves, boundary) if boundary._tensors else (batch, None)

    def _leaf(self, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        self._leaves.append(tensor.detach().requires_grad_())
        return self._leaves[-1]

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


def miscounted(state: State, samples: int, remaining: int) -> str:
    """Return the message about a batch whose microbatches do not hold every sample once."""
    return (
        f"A batch of {samples} samples was split into microbatches that count {samples - remaining} together, so "
        f"{'some would be lost' if remaining > 0 else 'some would count twice'}. Check split and count of "
        f"{type(state.task).__name__}: split(batch, size) returns every sample once, and count(batch) counts samples the same "
        "way in the batch and in its microbatches."
    )


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


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    """Return the parameters of some optimizers, in their order."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
