"""In which numbers. Exactly one precision is attached; others may wrap its hooks. Subclass :class:`hocket.Precision`.

`PrecisionLike` is what precisions have to be, `PrecisionHooks` what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hocket.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch


class PrecisionLike(Protocol):
    """What the loop and plug-ins ask of a precision besides its hooks. :class:`hocket.Precision` has it all, for float32."""

    #: Where this rank computes, whatever device the model comes on; the Trainer and Runtime set it before anything else.
    device: torch.device

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are converted to; None leaves them as the loader made them."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that matrix products are computed in, for figures such as MFU."""

    @property
    def own_loop(self) -> bool:
        """Whether it also works under `hocket.Runtime`, which calls no events, although it implements some."""

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return a context for ``backward`` under `hocket.Runtime`; under the Trainer, wrap the action `backward` instead."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, such as the loss scale."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Undo :meth:`state_dict`."""


class PrecisionHooks:
    """In the order of a run: convert once, then context, scale, unscale, a verdict and a step for every batch."""

    @hookspec(firstresult=True)
    def convert_module(self, module: torch.nn.Module, /) -> torch.nn.Module:
        """The module in the dtypes that it is stored in. Called once, before surgery and before optimizers exist."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def check_optimizer(self, optimizer: torch.optim.Optimizer, /) -> bool:
        """Raise ValueError for an optimizer that this precision cannot train with. Called once for each, before training."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def convert_batch(self, batch: Any, /) -> Any:
        """The batch with its floating-point tensors in the dtype that the module expects."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def begin_step(self, name: str, /) -> bool:
        """A step of a `hocket.Task.train_batch` begins, whose scale and overflows are its own.

        ``name``: those of its optimizers, joined by "+"; "" for all of them. Not called for tasks of one step.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def forward_context(self) -> AbstractContextManager[Any]:
        """Around forward and loss, in training, evaluation and prediction: autocast, or nothing."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def scale_loss(self, loss: torch.Tensor, /) -> torch.Tensor:
        """What to call ``backward`` on."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def unscale_gradients(self, optimizer: torch.optim.Optimizer, /) -> bool:
        """Undo the scaling of the loss in ``.grad``; once per computed gradient, before anyone looks at it."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def overflowed(self, all_reduce: Callable[[torch.Tensor, str], torch.Tensor], /) -> bool:
        """Whether the gradients of all optimizers, unscaled, overflowed because the loss is scaled; alike on every rank.

        Asked once per computed gradient, after clipping, with the strategy's ``all_reduce``. The step is then left out, and
        such gradients are not what ``nonfinite=`` is about: they are the precision's own affair.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], torch.Tensor], /) -> bool:
        """Step one optimizer; False if the step was skipped because the scaled gradients overflowed."""
        raise NotImplementedError
