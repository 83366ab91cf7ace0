"""The closure of optimizers that may compute gradients within their steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdRef

from hocket.basics.dtensors import norms
from hocket.help.ours import is_ours

#: Optimizers that have taken a step.
_SEEN: WeakSet[Optimizer] = WeakSet()
#: Optimizers that change tensors through ``.data`` before they call the closure, which tensors' versions do not show.
_UNCOUNTED: WeakSet[Optimizer] = WeakSet()


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether it computes gradients in its steps: LBFGS, and classes with ``requires_closure = True``."""
    return isinstance(optimizer, torch.optim.LBFGS) or bool(getattr(type(optimizer), "requires_closure", False))


def gets_closure(optimizer: Optimizer) -> bool:
    """Whether it may compute gradients in its steps: those of `needs_closure`, and others whose ``step`` takes a closure.

    Those of torch and hocket call it once, before anything else, so they do without.
    """
    return (_takes_closure(type(optimizer).step) and "step" not in vars(optimizer)) or needs_closure(optimizer)


@cache
def _takes_closure(step: Callable[..., Any]) -> bool:
    step = inspect.unwrap(step)
    known = step.__module__.startswith("torch.") or is_ours(step.__module__)
    return not known and "closure" in inspect.signature(step).parameters


def closure_for(optimizer: Optimizer, loss: Callable[[], Any], again: Callable[[], Any]) -> Callable[[], Any]:
    """Return the closure to step with: a `Closure` for optimizers that may call it."""
    return Closure(optimizer, loss, again) if gets_closure(optimizer) else again


class Closure:
    """Returns the loss whose gradients are there, until the optimizer has changed weights or gradients: then it computes again.

    An optimizer that calls it once, as most do, so steps with the gradients of the loop, which are computed once; one that
    calls it at other weights, such as a SAM or a line search, gets those of these weights.

    Args:
        optimizer: it is about to step with the gradients in ``.grad``.
        loss: returns their loss.
        again: computes gradients at the current weights, and returns the loss.
    """

    def __init__(self, optimizer: Optimizer, loss: Callable[[], Any], again: Callable[[], Any]) -> None:
        self._optimizer, self._loss, self._again = optimizer, loss, again
        self._called = False
        self._versions = self._look()
        #: Norms, in the first step of an optimizer: what it changes through ``.data`` has no new version.
        self._norms = None if optimizer in _SEEN else self._measure()
        _SEEN.add(optimizer)

    def __call__(self) -> Any:
        if not self._called:
            self._called = True
            if not self._changed():
                return self._loss()
        with torch.enable_grad():
            return self._again()

    def _changed(self) -> bool:
        if self._optimizer in _UNCOUNTED or self._versions != self._look():
            return True
        if self._norms is not None and not torch.allclose(self._norms, self._measure(), 0, 0, equal_nan=True):
            _UNCOUNTED.add(self._optimizer)
            return True
        return False

    def _tensors(self) -> list[Tensor]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [*parameters, *(p.grad for p in parameters if p.grad is not None)]

    def _look(self) -> list[tuple[WeakIdRef, int]]:
        return [(WeakIdRef(tensor), tensor._version) for tensor in self._tensors()]

    def _measure(self) -> Tensor:
        return norms(self._tensors())
