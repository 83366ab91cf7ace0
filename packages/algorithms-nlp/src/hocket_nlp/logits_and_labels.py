"""Find out which logits and labels a cross entropy is computed from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.basics.losses import Loss, classes
from hocket.data import nesting
from hocket.errors import WrongValue
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.state.state import State

#: Usual names of labels, which are preferred.
_NAMES = ("labels", "label", "targets", "target")


class Reading(NamedTuple):
    """How a loss is a cross entropy: ``find(outputs, batch)`` returns logits, and labels or None if all positions count."""

    find: Callable[[Any, Any], tuple[Tensor, Tensor | None]]
    class_dim: int
    ignore_index: int = -100
    class_weights: Tensor | None = None

    def weight(self, logits: Tensor, labels: Tensor | None) -> Any:
        """Return what the mean is over: the number of labels that count, or the sum of their class weights."""
        if labels is None:
            return logits.numel() // logits.size(self.class_dim)
        counted = labels != self.ignore_index
        if self.class_weights is None:
            return counted.sum()
        return self.class_weights.to(labels.device)[labels.where(counted, 0)].where(counted, 0).sum()


def reading_of(state: State, loss: Loss, outputs: Any, batch: Any) -> Reading | None:
    """Return how the loss of a microbatch is computed; None if no label counts in it, so that it cannot be told.

    Raises:
        ValueError: it is not known as a cross entropy.
    """
    task = state.task
    function = task.loss_function if isinstance(task, SupervisedTask) else None
    if (known := classes(function)) is not None and isinstance(task, SupervisedTask):
        called = function.func if isinstance(function, functools.partial) else function
        if called is not F.cross_entropy and not isinstance(called, nn.CrossEntropyLoss):
            raise WrongValue(
                "The loss is nll_loss, whose inputs are logarithms of probabilities, of which the z-loss is 0. Return logits "
                "from the model and write «loss=torch.nn.functional.cross_entropy», or remove z-loss."
            )
        return Reading(functools.partial(_of_task, task), 1, known[1], known[0])
    found: dict[Any, dict[str, Reading]] = {}
    value = loss.value.detach().double().cpu()
    summed = (loss.reduction or state.loss_reduction) == "sum"
    tolerance = max(1e-5, 2 * torch.finfo(loss.value.dtype).eps)
    with torch.no_grad(), torch.autocast(state.device.type, enabled=False):
        for key, name, reading in _candidates(outputs, batch):
            logits, labels = reading.find(outputs, batch)
            assert labels is not None
            expected = _cross_entropy(logits, labels, reading.class_dim, summed)
            if value.isnan() and not (labels != -100).any():
                return None
            if torch.isclose(expected.double().cpu(), value, rtol=tolerance, atol=0.0):
                found.setdefault(key, {})[name] = reading
    if found:
        # Inputs may fit as labels too, as in language models without padding, so prefer the usual names.
        readings = found[next((key for key in _NAMES if key in found), next(iter(found)))]
        # An untrained model may give all tokens the same probability, which fits both.
        kind = str(getattr(state.model, "loss_type", None) or type(state.model).__name__)
        first = "shifted" if "CausalLM" in kind or "LMHead" in kind else "plain"
        return readings.get(first) or next(iter(readings.values()))
    raise WrongValue(
        f"ZLoss compared the loss of {type(task).__name__}, {float(value):.6g}, with the cross entropy of its outputs and the "
        "labels in the batch, shifted and not, and found no match. Add hocket_nlp.functional.z_loss(logits, labels) to the "
        "loss in a hocket.Task, and remove z-loss."
    )


def _of_task(task: SupervisedTask, outputs: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
    targets = task.targets_of(batch)
    if not isinstance(outputs, Tensor):
        raise WrongValue(
            f"ZLoss needs logits, and the model returned {type(outputs).__name__}. Say where they are with «outputs=» of the "
            "Trainer, such as «outputs='logits'»."
        )
    indices = isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape != outputs.shape
    return outputs, targets if indices else None


def _candidates(outputs: Any, batch: Any) -> Iterator[tuple[Any, str, Reading]]:
    """Yield the key of labels, a name and the reading of each cross entropy that shapes allow."""
    for at, logits in enumerate(_floating(outputs)):
        items = (
            batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
        )
        for key, labels in items:
            if (
                not isinstance(labels, Tensor)
                or not labels.dim()
                or labels.is_floating_point()
                or labels.dtype == torch.bool
            ):
                continue
            if logits.shape[:-1] == labels.shape:
                yield key, "plain", Reading(functools.partial(_found, at, key, False), -1)
                if labels.dim() > 1:
                    yield key, "shifted", Reading(functools.partial(_found, at, key, True), -1)
            elif logits.dim() > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(labels.shape):
                yield key, "plain", Reading(functools.partial(_found, at, key, False), 1)


def _floating(outputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    nesting.map_tensors(lambda tensor: found.append(tensor) if tensor.is_floating_point() else None, outputs)
    return found


def _found(at: int, key: Any, shifted: bool, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    logits, labels = _floating(outputs)[at], batch[key].long()
    return (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)


def _cross_entropy(logits: Tensor, labels: Tensor, dim: int, summed: bool) -> Tensor:
    logits = logits if logits.dtype is torch.float64 else logits.float()
    outside = ((labels < 0) & (labels != -100)) | (labels >= logits.size(dim))
    if outside.any():  # other integers, not labels
        return torch.tensor(math.nan)
    rows = logits.movedim(dim, -1).flatten(0, -2)
    return F.cross_entropy(rows, labels.flatten(), ignore_index=-100, reduction="sum" if summed else "mean")
