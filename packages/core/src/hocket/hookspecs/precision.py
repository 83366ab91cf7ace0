"""Precision hooks. Exactly one precision is attached; plug-ins may wrap its hooks. Subclass :class:`hocket.Precision`.

`PrecisionLike` defines the attributes and methods of a precision, `PrecisionHooks` its hooks.
"""

# Specifications have no bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hocket.hookspecs.markers import hooks

if TYPE_CHECKING:
    import torch

    from hocket.basics.types import Batch


class PrecisionLike(Protocol):
    """The interface of a precision besides its hooks. :class:`hocket.Precision` implements it for float32."""

    #: The device that this rank computes on; the Trainer and Runtime set it before they call any hook.
    device: torch.device

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are converted to; None leaves them unchanged."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that matrix products are computed in, for figures such as MFU."""

    @property
    def own_loop(self) -> bool:
        """Whether it implements events or actions but also works under `hocket.Runtime`, which does not call them."""

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the context of ``backward`` under `hocket.Runtime`. Under the Trainer, wrap the action `backward` instead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, such as the loss scale."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state that :meth:`state_dict` returned."""


@hooks(firstresult=True)
class PrecisionHooks:
    """The hooks in call order: conversion once; then context, scaling, unscaling, overflow check and step for each batch."""

    def convert_module(self, module: torch.nn.Module, /) -> torch.nn.Module:
        """Convert the module to its storage dtypes and return it. Called once, before surgery and before optimizers exist."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer, /) -> bool:
        """Raise ValueError for an optimizer that this precision cannot train with. Called once for each, before training."""

    def convert_batch(self, batch: Batch, /) -> Any:
        """Return the batch with its floating-point tensors in the dtype that the module expects."""

    def begin_step(self, name: str, /) -> bool:
        """Begin a step of `hocket.Task.train_batch`, which has its own loss scale and overflow handling.

        ``name``: the names of its optimizers, joined by "+"; "" for all of them. Not called for tasks of one step.
        """

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of forward and loss in training, evaluation and prediction: autocast, or a null context."""

    def scale_loss(self, loss: torch.Tensor, /) -> torch.Tensor:
        """Return the scaled loss to call ``backward`` on."""

    def unscale_gradients(self, optimizer: torch.optim.Optimizer, /) -> bool:
        """Undo the loss scaling in ``.grad``. Called once per computed gradient, before any plug-in reads it."""

    def overflowed(self, all_reduce: Callable[[torch.Tensor, str], torch.Tensor], /) -> bool:
        """Whether the unscaled gradients of any optimizer overflowed due to loss scaling; identical on all ranks.

        Called once per computed gradient, after clipping, with the strategy's ``all_reduce``. After an overflow the step is
        skipped. ``nonfinite=`` does not apply to overflows caused by loss scaling.
        """

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], torch.Tensor], /) -> bool:
        """Step one optimizer. Return False if the step was skipped because the scaled gradients overflowed."""
