"""Tasks: what is trained, on which batches, towards which loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hocket.data import batches
from hocket.data.batches import Counts

#: ``tuple | list`` would be put together anew in every batch.
_SEQUENCE = (tuple, list)
_NO_PARTS: Mapping[str, Tensor] = {}


class Loss(NamedTuple):
    """The loss of a (micro)batch, and what it is a mean or a sum over.

    ``value``: scalar tensor. ``weight``: what the mean or sum was taken over, as a number or scalar tensor (samples, tokens
    that count, …), or None for the number of samples. ``parts``: named losses that ``value`` is the sum of, for the loggers.
    ``reduction``: ``"mean"`` or ``"sum"``, or None for what the Trainer's ``loss_reduction`` says, else a mean.

    The loss of a batch is ``sum(weight * value) / sum(weight)`` over its microbatches and ranks, or ``sum(value)`` if it is a
    sum, so its gradient does not depend on how the batch was split. Evaluation reports means:
    ``sum(value) / sum(weight)`` for sums.

    Example:
        >>> def loss(outputs, targets):
        ...     total = torch.nn.functional.mse_loss(outputs, targets, reduction="sum")
        ...     return Loss(total, weight=len(targets), reduction="sum")
    """

    value: Tensor
    weight: float | Tensor | None = None
    parts: Mapping[str, Tensor] = _NO_PARTS
    reduction: Literal["mean", "sum"] | None = None


def as_loss(returned: Any) -> Loss:
    """Understand what a loss function may return: a scalar Tensor, ``(value, weight)``, a dict of named losses, a Loss.

    A dict is summed, unless it has a ``"total"``: that is the loss then, and the others are logged. A tensor of one element is
    a scalar.
    """
    if type(returned) is Tensor or isinstance(returned, Tensor):
        loss = tuple.__new__(Loss, (returned, None, _NO_PARTS, None))  # Loss(returned) without a call in every batch
    elif isinstance(returned, Loss):
        loss = returned
        _check_weight(loss.weight)
        if loss.reduction not in (None, "mean", "sum"):
            raise ValueError(f"reduction={loss.reduction!r} of a hocket.Loss is neither 'mean' nor 'sum'.")
    elif isinstance(returned, Mapping) and returned:
        loss = _named(returned)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor | Mapping):
        _check_weight(returned[1])
        loss = as_loss(returned[0])._replace(weight=returned[1])
    else:
        number = isinstance(returned, int | float) or hasattr(returned, "__array__")
        raise TypeError(
            f"The loss function returned {type(returned).__name__}. It may return a scalar tensor (the mean over the "
            "samples), (mean, weight) where weight says what the mean is over, or a dict of named scalar tensors, which are "
            "added up. "
            + (
                "A number has no gradient: return the tensor, without .item() or .numpy()."
                if number
                else "Add several losses up, or name them: {'a': a, 'b': b}."
            )
        )
    if loss.value.dim() and loss.value.numel() == 1:
        return loss._replace(value=loss.value.squeeze())
    if loss.value.dim():
        raise ValueError(
            f"The loss has shape {tuple(loss.value.shape)} but must be a scalar. Take the mean, for instance with "
            "reduction='mean'; if that mean is not over samples, return (mean, weight)."
        )
    return loss


def _named(losses: Mapping[str, Any]) -> Loss:
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.dim():
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"The loss named {name!r} is {found}. Named losses are scalar tensors; leave out anything else."
            )
    if "total" not in losses:
        if "loss" in losses and len(losses) > 1:
            raise ValueError(
                f"The loss function returned a dict of {', '.join(map(repr, losses))}, which would be added up. If 'loss' is "
                "what to train on, call it 'total'; the others are then logged. If it is one of several, rename it."
            )
        return Loss(torch.stack(list(losses.values())).sum(), None, {k: v.detach() for k, v in losses.items()})
    return Loss(losses["total"], None, {k: v.detach() for k, v in losses.items() if k != "total"})


def _check_weight(weight: Any) -> None:
    if weight is None or (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
        return
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"The loss function returned (mean, weight) with the weight {weight!r}. A weight says what the mean is over: a "
            "number or a scalar tensor, 0 or more."
        )
    if weight.requires_grad:
        raise ValueError(
            "The loss function returned two tensors with gradients. A tuple is (mean, weight), where weight says what the mean "
            "is over, such as a number of tokens. Return the sum of two losses, a + b, or a dict of them, {'a': a, 'b': b}; a "
            "weight that was computed with parameters, as weight.detach()."
        )
    if weight.dim():
        raise ValueError(
            f"The loss function returned (mean, weight) with a weight of shape {tuple(weight.shape)}. It should be a scalar: "
            "what the mean is over, such as mask.sum()."
        )


def reduction_of(loss: Any) -> Literal["mean", "sum"] | None:
    """What a loss function says about itself, as ``torch.nn.MSELoss(reduction="sum")`` does; None if it says nothing."""
    said = loss.keywords.get("reduction") if isinstance(loss, functools.partial) else getattr(loss, "reduction", None)
    return "sum" if said == "sum" else None


class Task(nn.Module):
    """A model that knows its batches and its loss. Subclass it and define :meth:`forward` and :meth:`loss`.

    The other methods have defaults. ``self`` is what algorithms operate on and what checkpoints hold.
    """

    def forward(self, batch: Any) -> Any:
        """Outputs for a batch."""
        raise NotImplementedError(f"{type(self).__name__} needs a forward(batch)")

    def loss(self, outputs: Any, batch: Any) -> Tensor | tuple[Any, Any] | Mapping[str, Tensor] | Loss:
        """The loss of a batch, as a scalar tensor, a dict of named scalar tensors (summed), or ``(value, weight)``."""
        raise NotImplementedError(f"{type(self).__name__} needs a loss(outputs, batch)")

    def eval_forward(self, batch: Any) -> Any:
        """Outputs for a batch in evaluation and prediction; as in training, unless overridden."""
        return self(batch)

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether :meth:`loss` understands what :meth:`eval_forward` returns; if not, evaluation reports metrics only."""
        return type(self).eval_forward is Task.eval_forward

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Fresh metrics by name for ``"train"`` or for the label of an evaluation set: objects with update, compute, reset."""
        return {}

    def update_metric(self, metric: Any, outputs: Any, batch: Any) -> None:
        """Show a batch to a metric; ``metric.update(outputs, batch[1])`` unless overridden."""
        metric.update(outputs, batches.get_item(batch, 1))

    def count(self, batch: Any) -> int | Counts:
        """Samples, or (samples, tokens), in a batch; see :func:`hocket.data.batches.count`."""
        return batches.count(batch)

    def split(self, batch: Any, size: int) -> Sequence[Any]:
        """Split a batch into microbatches of at most ``size`` samples, as :meth:`count` counts them.

        Together they hold every sample once, in order. See :func:`hocket.data.batches.split` for what is split unless this is
        overridden; batches of graphs or packed sequences, for instance, need a method of their own.

        Example:
            >>> class Detection(Task):
            ...     def split(self, batch, size):
            ...         images, boxes = batch
            ...         starts = range(0, len(images), size)
            ...         return [(images[i : i + size], boxes[i : i + size]) for i in starts]
        """
        if type(self).count is Task.count:
            return batches.split(batch, size)
        counted = self.count(batch)
        return batches.split(batch, size, int(counted[0] if isinstance(counted, tuple) else counted))

    def configure_optimizers(self) -> Any:
        """An optimizer or a sequence of them, for a Trainer that was given none."""
        return None

    def extra_state(self) -> Any:
        """What a resumed run needs besides parameters and buffers, such as a hidden state carried from batch to batch.

        Tensors, numbers, strings, None, and lists and dicts of them; saved for each rank.
        """
        return None

    def load_extra_state(self, state: Any) -> None:
        """Undo :meth:`extra_state`. Tensors arrive on the CPU; ranks that were not there before get what rank 0 saved.

        Not called for checkpoints without any.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a load_extra_state(state)")

    @property
    def model(self) -> nn.Module:
        """What algorithms operate on and what checkpoints hold."""
        return self

    @model.setter
    def model(self, module: nn.Module) -> None:
        raise TypeError(f"{type(self).__name__} is a Task and cannot be replaced as a whole; replace its submodules.")


class SupervisedTask(Task):
    """An ordinary module and a loss function. Batches are ``(inputs, targets)``, or mappings of keyword arguments."""

    def __init__(
        self, network: nn.Module, loss: Callable[[Any, Any], Any] | None, inputs: Any = None, targets: Any = None
    ) -> None:
        super().__init__()
        self.inputs, self.targets = inputs, targets
        self.network = network
        self.loss_function = loss

    def forward(self, batch: Any) -> Any:
        """``network(inputs)``, or ``network(**batch)`` for a mapping."""
        network = self._modules["network"]  # self.network would go through __getattr__, in every batch
        assert network is not None
        if self.inputs is not None:
            return network(batches.part(batch, self.inputs))
        if isinstance(batch, _SEQUENCE):
            return network(batch[0])
        return network(**batch) if isinstance(batch, Mapping) else network(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """``loss(outputs, targets)``; for a mapping ``loss(outputs, batch)``; without a function, the model's own loss."""
        if self.loss_function is not None:
            return self.loss_function(outputs, self.targets_of(batch))
        own = own_loss(outputs)
        if own is None:
            raise TypeError(
                f"{type(self.network).__name__} returned {type(outputs).__name__} without a loss, and the Trainer was given "
                "none. Pass loss=, for instance loss=torch.nn.functional.cross_entropy, or a hocket.Task as the model."
            )
        return own

    def targets_of(self, batch: Any) -> Any:
        """What the loss function compares outputs with."""
        if self.targets is not None:
            return batches.part(batch, self.targets)
        return batch[1] if isinstance(batch, _SEQUENCE) else batch

    def update_metric(self, metric: Any, outputs: Any, batch: Any) -> None:
        """``metric.update(outputs, targets)``; of outputs that have logits, as those of transformers, these."""
        where = self.targets
        if where is None and isinstance(batch, Mapping):
            if "labels" not in batch or own_loss(outputs) is None:
                raise ValueError(
                    f"Which part of a batch metrics compare with is not known: it is a {type(batch).__name__} with "
                    f"{', '.join(map(repr, batch))}. Pass targets= to the Trainer, such as targets='label'."
                )
            where = "labels"
        found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        metric.update(outputs if found is None else found, batches.part(batch, 1 if where is None else where))

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether there is a loss function, or the model's outputs hold a loss."""
        return self.loss_function is not None or own_loss(outputs) is not None

    @property
    def model(self) -> nn.Module:
        """The network that was given."""
        return self.network

    @model.setter
    def model(self, module: nn.Module) -> None:
        self.network = module


def own_loss(outputs: Any) -> Any:
    """The loss in the outputs of a model that computes it itself, as those of transformers do; None if there is none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
