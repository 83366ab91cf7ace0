"""Check the first step of a custom loop: mistakes that would train with other numbers. Later steps cost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hocket.errors import WrongState
from hocket.help import warn
from hocket.hookspecs import PrecisionLike
from hocket_strategies.custom_loops.accumulation import Gradients


class FirstStep:
    """Watch models from their set-up to their first step.

    Args:
        precision: what models compute with. A given module that is called itself misses the precision's context, and scaled
            gradients that are clipped become too small.
        gradients: knows whether a prepared model is called, or a step of `Runtime.stepper` runs, which prepares its loss
            functions.
    """

    def __init__(self, precision: PrecisionLike, gradients: Gradients) -> None:
        self._gradients = gradients
        self._converts = precision.compute_dtype is not torch.float32
        #: By model, as the strategy prepared it, until it is called as such: the handle of a hook of the given module.
        self._uncalled: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        #: The models whose given module was called itself.
        self._bypassed: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        from hocket.precision.base import Precision

        #: The version of each parameter's gradient after the latest backward pass; None once that is checked.
        self.versions: dict[torch.Tensor, int] | None = (
            {} if getattr(type(precision), "scale_loss", None) is not Precision.scale_loss else None
        )

    def watch(self, given: nn.Module, root: nn.Module) -> None:
        """Watch a model: the given module, and what the strategy made of it."""
        if self._converts:
            self._uncalled[root] = given.register_forward_pre_hook(partial(self._called, root))

    def record(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients after a backward pass."""
        self.versions = {each: each.grad._version for each in parameters if each.grad is not None}

    def check(self, optimizer: torch.optim.Optimizer, roots: Iterable[nn.Module]) -> None:
        """Check the models of an optimizer before its first step, and the gradients before the first step of all.

        Raises RuntimeError if a given module was called itself. Warns if scaled gradients were changed.
        """
        for root in roots:
            self.end(root)
            if root in self._bypassed:
                raise WrongState(_BYPASSED.format(type(optimizer).__name__))
        if (versions := self.versions) is not None:
            self.versions = None
            held = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
            if any(versions.get(each, each.grad._version) != each.grad._version for each in held):
                warn(_SCALED)

    def end(self, root: nn.Module) -> None:
        """Watch a model no longer."""
        if (handle := self._uncalled.pop(root, None)) is not None:
            handle.remove()

    def _called(self, root: nn.Module, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._gradients.stepping is not None:
            return
        if self._gradients.calling:
            self.end(root)
        else:
            self._bypassed[root] = None


_BYPASSED = (
    "{} is stepped, and the module that was given to setup was called, without the precision's context, and not what setup "
    "returned. Write model, optimizer = runtime.setup(model, optimizer), and outputs = model(inputs) with that model."
)
_SCALED = (
    "Gradients were changed between runtime.backward and runtime.step, while they are multiplied by the loss scale: "
    "torch.nn.utils.clip_grad_norm_ would clip them too far. To clip, write runtime.clip_gradients(model, optimizer, norm=1.0)."
)
