"""Know what a loss is a mean over: watch the calls of torch's classification losses, and note the divisors of their means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hocket.distributed.dtensors import mesh_of
from hocket.help import warn
from hocket.losses import WHOLE, Loss, as_loss

if TYPE_CHECKING:
    from hocket.state import State

_MEANS = {torch.mean, torch.Tensor.mean}
_NAMES = {each: tuple(inspect.signature(each).parameters) for each in (F.cross_entropy, F.nll_loss)}
#: Functions that may return a mean.
_WATCHED = {
    *_MEANS,
    *(
        each
        for name, each in vars(F).items()
        if name.endswith(("_loss", "entropy", "_logits", "kl_div")) and callable(each)
    ),
}


class _Mean(NamedTuple):
    """A mean over the labels that count: of which outputs, what it divided by, and the labels' number and first dimension."""

    outputs: Tensor
    value: Tensor
    divisor: Tensor
    labels: int
    rows: int


def weighed(state: State, function: Callable[..., Any], *args: Any) -> tuple[Loss, Any]:
    """Return the loss that a function computes, and what it returned. A mean over labels gets their number as its weight.

    ``state.step.composed`` says whether the loss is more than that mean of the outputs, such as a multiple of it, or one over
    pairs of samples.

    Raises:
        ValueError: in training, the loss is a sum of means over different numbers, so that no weight is right.
    """
    with _Divisors() as seen:
        returned = function(*args)
    loss = as_loss(returned)
    state.step.composed = False
    over = loss.reduction or state.loss_reduction
    if not seen.means or loss.weight is not None or over == "sum" or over in WHOLE:
        return loss, returned
    first = seen.means[0]
    composed = len(seen.means) > 1 or first.value is not loss.value
    state.step.composed = composed or first.outputs is not args[0]
    differs = seen.differs() if composed else ""
    if differs and over is None:
        message = (
            "The loss adds up means over different numbers: cross-entropy over labels of which some are ignored or weighted "
            f"by class, and {differs}. So no weight of a microbatch, or of a rank's or evaluation's batch, gives the loss "
            "of the full batch. Take the other mean over the same labels; or take the mean over all samples, "
            "cross_entropy(…, reduction='none').mean(); or pass loss_reduction='mean', which weights the parts by samples; or "
            "train on one rank without microbatch= and accumulate=."
        )
        if seen.training:
            raise ValueError(message)
        warn(message)
    elif differs:
        return loss, returned
    return loss._replace(weight=first.divisor), returned


class _Divisors(TorchFunctionMode):
    """Notes the means of torch's classification losses over class indices, and the sizes of other means."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[_Mean] = []
        self.training = torch.is_grad_enabled()
        #: The first dimensions of what other means are over.
        self._others: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _NAMES:
            return self._classification(func, {**dict(zip(_NAMES[func], args, strict=False)), **kwargs})
        value = func(*args, **kwargs)
        if func in _MEANS:
            mean = len(args) == 1 and not kwargs.get("dim")
        else:
            mean = kwargs.get("reduction", "mean") in ("mean", "batchmean")
        if mean and args and isinstance(args[0], Tensor):
            self._note(value, args[0])
        return value

    def _note(self, value: Any, over: Tensor) -> None:
        if over.dim() and isinstance(value, Tensor) and not value.dim() and (value.requires_grad or not self.training):
            self._others.append(over.shape[0])

    def _classification(self, func: Any, given: dict[str, Any]) -> Any:
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

    def differs(self) -> str:
        """Say which mean is not over as many elements as the first, up to a constant for each sample; empty for none."""
        first, *rest = self.means
        others = [each for each in self._others if first.rows and each % first.rows == 0]
        if not (rest or others):
            return ""
        complete = bool(first.divisor == first.labels)
        for each in rest:
            if not torch.equal(each.divisor, first.divisor) and not (complete and each.divisor == each.labels):
                return "the same over other labels"
        return "another mean over samples or their elements" if others and not complete else ""


def _transformed(tensor: Tensor) -> bool:
    """Whether the tensor is of torch.func, such as vmap, whose values are not known yet."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)
