"""The output layer and the loss function of a model with fused cross entropy, and the hooks that connect them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket_nlp.linear_cross_entropy import mean_of, summed


@dataclass
class _Request:
    """The labels for the output layer, and what it found while it computed the loss."""

    labels: Tensor
    ignore_index: int
    by_items: bool
    number: Any = None
    z_loss: Any = None


class FusedHead(nn.Linear):
    """An output layer that returns the sum of the losses, a scalar, instead of logits, while its model trains with labels."""

    #: Rows of a chunk, or None; the coefficient of the z-loss; and the labels of the current forward pass, or None.
    chunk_rows: int | None = None
    z_loss: float = 0.0
    request: _Request | None = None
    #: Whether it has computed a loss.
    used = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits, ``(..., V)``; or the sum of the losses if labels were given to the model."""
        return super().forward(hidden) if self.request is None else self._sum(hidden, self.request)

    @torch.compiler.disable
    def _sum(self, hidden: Tensor, request: _Request) -> Tensor:
        self.used = True
        labels = request.labels.to(hidden.device).long()
        total, z_total = summed(
            hidden, self.weight, labels, self.bias, ignore_index=request.ignore_index, z_loss=self.z_loss,
            chunk_rows=self.chunk_rows,
        )  # fmt: skip
        request.number = (labels != request.ignore_index).sum()
        request.z_loss = mean_of(z_total, request.number)
        return total

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "request": None}


class FusedLoss:
    """The loss function of a model with a `FusedHead`: divides the sum of the losses; of logits it is the ``plain`` one."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean over the labels that count, or the sum divided by ``num_items_in_batch``."""
        logits = args[0] if args else kwargs["logits"]
        return self._divide(*args, **kwargs) if not logits.dim() else self.plain(*args, **kwargs)

    def _divide(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int = 0,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if num_items_in_batch is not None:
            items = num_items_in_batch
            return logits / (items.to(logits.device) if isinstance(items, Tensor) else items)
        shifted = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
        return mean_of(logits, (shifted != ignore_index).sum().to(logits.device))


class WithheldLogits:
    """In the place of logits that were not computed: raises an error that says so when it is used.

    ``number`` is the number of labels that count, None if the loss was divided by another; ``z_loss`` the mean z-loss.
    """

    __slots__ = ("number", "z_loss")

    def __init__(self, number: Tensor | None, z_loss: Tensor) -> None:
        self.number = number
        self.z_loss = z_loss

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_WITHHELD} (There is no {name}.)")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise WrongType(_WITHHELD)

    __getitem__ = __iter__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = (
        _refuse
    )
    __neg__ = __lt__ = __gt__ = __le__ = __ge__ = __float__ = __pow__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise WrongType(_WITHHELD)

    def __repr__(self) -> str:
        return "WithheldLogits()"


_WITHHELD = (
    "fused-cross-entropy computes the loss in training without holding logits, so there are none here. Use metrics that need "
    "logits in evaluation, or remove fused-cross-entropy; for logits of a training batch call the model without labels."
)


def withheld_of(outputs: Any) -> WithheldLogits | None:
    """Return the object in the place of logits of a model's outputs, or None if they were computed."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, WithheldLogits) else None


@torch.compiler.disable
def give_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before forward: hand the labels on to the output layer, if there are any and the model trains."""
    head = model.get_output_embeddings()
    given = {**dict(zip(_parameters(type(model).forward), args, strict=False)), **kwargs}
    labels = given.get("labels")
    if labels is None or not model.training:
        return
    if not isinstance(head, FusedHead):
        raise WrongValue(
            f"The output layer of {type(model).__name__} was replaced after fused-cross-entropy, by a {type(head).__name__}. "
            "Apply fused-cross-entropy to the model that is trained, after adapters and changes of the vocabulary."
        )
    ignore_index, shifted = given.get("ignore_index", -100), given.get("shift_labels")
    shifted = _shifted(labels, ignore_index) if shifted is None else shifted
    head.request = _Request(shifted, ignore_index, given.get("num_items_in_batch") is not None)


@torch.compiler.disable
def withhold_logits(model: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
    """After forward: put an object that raises an error in the place of the sum of the losses."""
    head = model.get_output_embeddings()
    request = head.request if isinstance(head, FusedHead) else None
    if request is None:
        return None
    head.request = None
    if outputs is None:  # after an exception
        return None
    withheld = WithheldLogits(None if request.by_items else request.number, request.z_loss)
    if isinstance(outputs, tuple):  # return_dict=False
        return (outputs[0], withheld, *outputs[2:])
    outputs["logits"] = withheld
    return outputs


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the label of each position's successor; the last position has none."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
