"""Know what a loss is a mean over: watch the calls of torch while it is computed, and note the divisors of means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hocket.basics.dtensors import mesh_of
from hocket.basics.losses import WHOLE, Loss, as_loss
from hocket.errors import WrongValue
from hocket.help import warn

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from hocket.basics.losses import Reduction
    from hocket.state.known_weights import KnownWeights

_MEANS = {torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean}
_SUMS = {torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero}
_DIVISIONS = {getattr(of, name) for of in (torch, Tensor) for name in ("div", "divide", "true_divide")} | {
    Tensor.__truediv__,
    Tensor.div_,
    Tensor.__itruediv__,
}
#: Functions of a sum that leave the number of elements in it.
_SAME = {
    torch.clamp, torch.clamp_min, torch.maximum, torch.max, torch.add, Tensor.clamp, Tensor.clamp_min, Tensor.clamp_,
    Tensor.clamp_min_, Tensor.maximum, Tensor.max, Tensor.add, Tensor.__add__, Tensor.to, Tensor.float, Tensor.double,
    Tensor.type_as, Tensor.type, Tensor.detach, Tensor.clone,
}  # fmt: skip
_SELECTIONS = {
    Tensor.__getitem__, torch.masked_select, Tensor.masked_select, torch.index_select, Tensor.index_select, torch.take,
    Tensor.take,
}  # fmt: skip
_BY_HAND = _SUMS | _DIVISIONS | _SAME | _SELECTIONS
#: The classification losses, with the names of their parameters.
_NAMES = {function: tuple(inspect.signature(function).parameters) for function in (F.cross_entropy, F.nll_loss)}
#: Functions that may return a mean.
_WATCHED = {
    *_MEANS,
    *_BY_HAND,
    *(
        function
        for name, function in vars(F).items()
        if name.endswith(("_loss", "entropy", "_logits", "kl_div")) and callable(function)
    ),
}


class _Mean(NamedTuple):
    """A mean over the labels that count: of which outputs, what it divided by, and the labels' number and first dimension."""

    outputs: Tensor
    value: Tensor
    divisor: Tensor
    labels: int
    rows: int


_DIFFERENT_MEANS = (
    "The loss adds up means over different numbers: cross-entropy over labels of which some are ignored or weighted by class, "
    "and {other}. So no weight of a microbatch, or of a rank's or evaluation's batch, gives the loss of the full batch. "
    "{change}; or pass «loss_reduction='mean'», which weights the parts by samples; or train on one rank without «microbatch=» "
    "and accumulate=."
)


class LossWatch(TorchFunctionMode):
    """Notes what a loss is a mean over, while it is entered: around the loss function and the plug-ins that change its value.

    It knows the means of torch's classification losses over class indices, the sizes of other means, and means by hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means: list[_Mean] = []
        #: The divisors of means that are written by hand, such as the sum of a mask, or the number of elements that it selects.
        self.divisors: list[float | Tensor] = []
        self.training = torch.is_grad_enabled()
        #: The loss of the task; and whether it is more than a mean over labels of the outputs, such as a multiple of it, or one
        #: over pairs of samples.
        self.value: Tensor | None = None
        self.composed = False
        #: What the loss is divided by, such as ``mask.sum()``, if it is written by hand. Whether that is its weight is tried
        #: by `hocket.loop.inferred_weights`.
        self.divisor: float | Tensor | None = None
        #: The values of other means; and again with the first dimensions of what they are over.
        self._values: list[Tensor] = []
        self._others: list[tuple[int, Tensor]] = []
        #: Sums, and what was computed from them, each with its sum; and the numbers of elements that were selected.
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._selected: list[int] = []
        #: Sums with a gradient, and what they are over.
        self._totals: list[tuple[Tensor, Tensor]] = []

    def weighed(self, declared: Reduction | None, function: Callable[..., object], *args: Any) -> Loss:
        """Return the loss that a function computes. A mean over labels gets their number as its weight.

        Args:
            declared: what losses that do not say it are over.
            args: of the function; the outputs of the model, or a batch, are first.

        Raises:
            ValueError: in training, the loss is a sum of means over different numbers, so that no weight is right.
        """
        for noted in (self.means, self.divisors, self._values, self._others, self._sums, self._selected, self._totals):
            noted.clear()
        loss = as_loss(function(*args))
        self.value, self.composed, self.divisor = loss.value, False, None
        over = loss.reduction or declared
        if loss.weight is not None or over == "sum" or over in WHOLE:
            return loss
        if not self.means:
            if over is None and self.divisors:
                divisor, *others = self.divisors
                if all(other is divisor or float(other) == float(divisor) for other in others):
                    self.divisor = divisor
            return loss
        first = self.means[0]
        composed = len(self.means) > 1 or first.value is not loss.value
        self.composed = composed or first.outputs is not args[0]
        if composed and over == "mean":
            return loss  # by samples in every microbatch, whether labels are ignored in it or not
        other_mean = self._other_mean(first) if composed else ""
        if other_mean:
            change = (
                "Take the other mean over the same labels; or take the mean over all samples, "
                "cross_entropy(…, reduction='none').mean()"
            )
            message = _DIFFERENT_MEANS.format(other=other_mean, change=change)
            if self.training:
                raise WrongValue(message)
            warn(message)
        return loss._replace(weight=first.divisor)

    def covers_additions(self, declared: Reduction | None, loss: Loss, now: Tensor | None, known: KnownWeights) -> bool:
        """Whether the weight of the loss is the weight of what plug-ins added to it too.

        Args:
            declared: what losses that do not say it are over.
            loss: as the task and plug-ins returned it; ``now`` is what was made of it since.
            known: what is known of earlier batches.

        Raises:
            ValueError: they added a mean over another number, so that no weight is right.
        """
        over = loss.reduction or declared
        if now is self.value or over == "sum" or over in WHOLE:
            return True
        known.additions += 1
        if known.additions & (known.additions - 1) and not (self.value is None or self.value.is_cpu):
            return known.covers_additions  # the host waits for the numbers of the 1st, 2nd, 4th, … microbatch only
        if not self.means:
            return True
        weighed = next((mean for mean in self.means if mean.divisor is loss.weight), None)
        if weighed is None and loss.weight is not None:
            return True  # whoever gave the weight knows what it is of
        other_mean = self._other_mean(weighed or self.means[0], divisions=True)
        if not other_mean and weighed is None and any(mean.divisor != mean.labels for mean in self.means):
            other_mean = "the loss of the task, over samples"
        if not other_mean:
            return True
        if over == "mean":
            known.covers_additions = False
            return False
        change = (
            "A plug-in added the other mean. Omit the class weights, or what ignores labels; or train without the plug-in, or "
            "with that mean in the task's loss, over the same labels"
        )
        raise WrongValue(_DIFFERENT_MEANS.format(other=other_mean, change=change))

    @property
    def certain(self) -> bool:
        """Whether the loss is a mean over all elements of a tensor."""
        return not self.divisors and any(value is self.value for value in self._values)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _NAMES:
            return self._classification(func, {**dict(zip(_NAMES[func], args, strict=False)), **kwargs})
        value = func(*args, **kwargs)
        if func in _BY_HAND:
            self._note_by_hand(func, value, args)
            return value
        mean = func in _MEANS or kwargs.get("reduction", "mean") in ("mean", "batchmean")
        if mean and args and isinstance(args[0], Tensor):
            self._note(value, args[0])
        return value

    def _note(self, value: object, over: Tensor) -> None:
        """Note a mean, if it is one and has a gradient."""
        if over.dim() and isinstance(value, Tensor) and not value.dim() and (value.requires_grad or not self.training):
            self._values.append(value)
            self._others.append((over.shape[0], value))
            if over.shape[0] in self._selected:
                self.divisors.append(over.numel())

    def _note_by_hand(self, func: Callable[..., Any], value: Any, args: tuple[Any, ...]) -> None:
        """Note a sum, a selection, or a division by a sum."""
        if torch.compiler.is_compiling() or (len(args) < (1 if func in _SUMS else 2) and func not in _SAME):
            return
        if func in _SUMS:
            if not value.dim() and not value.requires_grad:
                self._sums.append((value, value))
            elif not value.dim() and args[0].dim():
                self._totals.append((value, args[0]))
        elif func in _SELECTIONS:
            indices = args[1] if type(args[1]) is tuple else args[1:]
            if value.dim() and any(isinstance(index, Tensor) for index in indices):
                self._selected.append(value.shape[0])
        elif func in _SAME:
            total = self._sum_behind(args)
            if total is not None and isinstance(value, Tensor) and not value.requires_grad:
                self._sums.append((value, total))
        elif not isinstance(args[1], Tensor):
            over = next((over for total, over in self._totals if total is args[0]), None)
            if over is not None:
                self._others.append((over.shape[0], value))
        elif (divisor := self._sum_behind(args[1:2])) is not None and (value.requires_grad or not self.training):
            self.divisors.append(divisor)

    def _sum_behind(self, args: Iterable[object]) -> Tensor | None:
        """Return the sum that one of these values was computed from."""
        return next((total for value, total in self._sums if any(value is arg for arg in args)), None)

    def _classification(self, func: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """Compute one of torch's classification losses by its arguments, and note the number of labels that count."""
        outputs, targets = given["input"], given["target"]
        legacy = given.get("size_average") is False or given.get("reduce") is False
        if given.get("reduction", "mean") != "mean" or legacy:
            return func(**given)
        if targets.is_floating_point() or mesh_of(targets) is not None or _transformed(targets):
            value = func(**given)  # a mean over all positions
            self._note(value, targets)
            return value
        labels = targets.detach()
        if type(labels) is not Tensor:  # compiled code stays one graph if it is
            labels = labels.as_subclass(Tensor)
        classes = given.get("weight")
        counts = labels != given.get("ignore_index", -100)
        counted = counts if classes is None else classes.detach()[labels.where(counts, 0).long()].where(counts, 0)
        divisor = counted.sum()
        # A mean over nothing is NaN. Its gradient is 0, as torch skips ignored labels, but NaN where all weights are 0. Nothing
        # here waits for a device, and compiled code stays one graph without the hook.
        if classes is not None and outputs.requires_grad and torch.is_grad_enabled():
            given["input"] = outputs.view_as(outputs)
            given["input"].register_hook(lambda gradient: torch.where(divisor != 0, gradient, 0))
        value = torch.where(divisor != 0, func(**given), 0)
        if value.requires_grad or not self.training:  # otherwise it is no part of the loss
            self.means.append(_Mean(outputs, value, divisor, labels.numel(), labels.shape[0] if labels.dim() else 1))
        return value

    def _other_mean(self, first: _Mean, divisions: bool = False) -> str:
        """Describe a mean over another number of elements than the first, up to a constant for each sample; empty for none.

        Args:
            divisions: look at sums that are divided by hand too.
        """
        means = [mean for mean in self.means if mean is not first]
        over_samples = [
            value
            for rows, value in self._others
            if first.rows and rows % first.rows == 0 and not _are_apart(value, first.value)
        ]
        divisors = self.divisors if divisions else []
        if not (means or over_samples or divisors):
            return ""
        all_count = bool(first.divisor == first.labels)  # no label is ignored, so that it is a mean over samples too
        for mean in means:
            if not torch.equal(mean.divisor, first.divisor) and not (all_count and mean.divisor == mean.labels):
                return "the same over other labels"
        if any(abs(float(divisor) / float(first.divisor) - 1) > 1e-6 for divisor in divisors if first.divisor):
            return "a sum that is divided by another number"
        return "another mean over samples or their elements" if over_samples and not all_count else ""


def _transformed(tensor: Tensor) -> bool:
    """Whether the tensor is of torch.func, such as vmap, whose values are not known yet."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _are_apart(value: Tensor, loss: Tensor) -> bool:
    """Whether a value is computed without what the loss is computed from, but for parameters, as a penalty of weights is."""
    return value.grad_fn is not None and loss.grad_fn is not None and _inner(value).isdisjoint(_inner(loss))


def _inner(value: Tensor) -> set[Node]:
    """Return the nodes of the graph of a value that compute something."""
    nodes: set[Node] = set()
    left = [value.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes and node.next_functions:
            nodes.add(node)
            left.extend(function for function, _ in node.next_functions)
    return nodes
