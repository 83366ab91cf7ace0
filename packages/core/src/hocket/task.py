"""Tasks: what is trained, on which batches, towards which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.data import batches
from hocket.data.batches import Counts

#: ``tuple | list`` would be put together anew in every batch.
_SEQUENCE = (tuple, list)
_NO_PARTS: Mapping[str, Tensor] = {}


class Loss(NamedTuple):
    """The mean loss of a (micro)batch, and what that mean is over.

    ``value``: scalar tensor. ``weight``: what the mean was taken over, as a number or scalar tensor (samples, tokens that
    count, …), or None for the number of samples. ``parts``: named losses that ``value`` is the sum of, for the loggers.

    The loss of a batch is ``sum(weight * value) / sum(weight)`` over its microbatches and ranks, so its gradient does not
    depend on how the batch was cut.
    """

    value: Tensor
    weight: float | Tensor | None = None
    parts: Mapping[str, Tensor] = _NO_PARTS


def as_loss(returned: Any) -> Loss:
    """Understand what a loss function may return: a scalar Tensor, ``(value, weight)``, a dict of named losses, a Loss."""
    if type(returned) is Tensor or isinstance(returned, Tensor):
        loss = tuple.__new__(Loss, (returned, None, _NO_PARTS))  # Loss(returned) without a function call in every batch
    elif isinstance(returned, Loss):
        loss = returned
    elif isinstance(returned, Mapping) and returned:
        loss = Loss(torch.stack(list(returned.values())).sum(), None, {k: v.detach() for k, v in returned.items()})
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor):
        loss = Loss(returned[0], returned[1])
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Mapping):
        loss = as_loss(returned[0])._replace(weight=returned[1])
    else:
        raise TypeError(
            f"The loss function returned {type(returned).__name__}. It may return a scalar tensor (the mean over the "
            "samples), (mean, weight) where weight says what the mean is over, or a dict of named scalar tensors."
        )
    if loss.value.dim():
        raise ValueError(
            f"The loss has shape {tuple(loss.value.shape)} but must be a scalar. Take the mean, for instance with "
            "reduction='mean'; if that mean is not over samples, return (mean, weight)."
        )
    return loss


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
        return batches.split(batch, size, counted if isinstance(counted, int) else counted[0])

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

    def __init__(self, network: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        super().__init__()
        self.network = network
        self.loss_function = loss

    def forward(self, batch: Any) -> Any:
        """``network(inputs)``, or ``network(**batch)`` for a mapping."""
        network = self._modules["network"]  # self.network would go through __getattr__, in every batch
        assert network is not None
        if isinstance(batch, _SEQUENCE):
            return network(batch[0])
        return network(**batch) if isinstance(batch, Mapping) else network(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """``loss(outputs, targets)``; for a mapping ``loss(outputs, batch)``; without a function, the model's own loss."""
        if self.loss_function is not None:
            return self.loss_function(outputs, batch[1] if isinstance(batch, _SEQUENCE) else batch)
        own = _own_loss(outputs)
        if own is None:
            raise TypeError(
                f"{type(self.network).__name__} returned {type(outputs).__name__} without a loss, and the Trainer was given "
                "none. Pass loss=, for instance loss=torch.nn.functional.cross_entropy, or a hocket.Task as the model."
            )
        return own

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether there is a loss function, or the model's outputs hold a loss."""
        return self.loss_function is not None or _own_loss(outputs) is not None

    @property
    def model(self) -> nn.Module:
        """The network that was given."""
        return self.network

    @model.setter
    def model(self, module: nn.Module) -> None:
        self.network = module


def _own_loss(outputs: Any) -> Any:
    """What a model that computes its loss itself, as those of transformers do, returned it as."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
