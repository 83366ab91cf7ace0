"""The optimizers of a custom loop: the models whose parameters they hold, and the checks before their first steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hocket.errors import WrongState
from hocket.hookspecs.needs import Need
from hocket.optim.optimizers import check_parameters
from hocket.run.joined import Joined
from hocket_strategies.custom_loops import checks
from hocket_strategies.custom_loops.accumulation import Gradients
from hocket_strategies.custom_loops.first_step import FirstStep


class PreparedOptimizers:
    """Record the models and optimizers that were set up, and turn the gradients of an optimizer into means.

    Args:
        gradients: the gradients that accumulate between steps.
        first_step: the checks of models before their first step.
    """

    def __init__(self, gradients: Gradients, first_step: FirstStep) -> None:
        self._gradients, self._first_step = gradients, first_step
        #: By parameter of each model that was set up: a weak reference to the module that the strategy made of the model.
        self.roots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        #: The optimizers that may step, each with the handle of a hook until its first step.
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        #: The optimizers whose first gradients were compared over ranks.
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add_model(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Record a model, as the strategy prepared it, under its parameters."""
        for parameter in parameters:
            self.roots[parameter] = weakref.ref(root)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer. Until its first ``runtime.step(optimizer)``, it refuses ``optimizer.step()``."""
        self._hooks[optimizer] = optimizer.register_step_pre_hook(self._gradients.refuse_own_step)

    def allow_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the hook that refuses ``optimizer.step()``: after one ``runtime.step`` it would only cost time."""
        if (hook := self._hooks.get(optimizer)) is not None:
            hook.remove()
            self._hooks[optimizer] = None

    def root_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the first model that holds an optimizer's parameters. Raises ValueError if it holds others."""
        check_parameters(optimizer, {*self.roots}, "a model that was set up", SET_UP_ALL)
        root: nn.Module = self.roots[_held(optimizer)[0]]()
        return root

    def finish(self, joined: Joined, optimizer: torch.optim.Optimizer) -> bool:
        """Turn the gradients of an optimizer into means, and check them once. Return whether it has not stepped yet.

        Raises:
            TypeError: it is not an optimizer.
            ValueError: it holds parameters of no model that was set up.
            RuntimeError: its gradients differ between ranks, or a given module was called itself.
        """
        try:
            first = self._hooks.get(optimizer, _UNKNOWN) is not None
        except TypeError:  # a value that cannot be referenced weakly
            first = True
        if first:
            checks.check_optimizer(optimizer, "step(optimizer)")
            self.root_of(optimizer)
            self._hooks.setdefault(optimizer)
            roots = (self.roots[each]() for each in _held(optimizer))
            self._first_step.check(optimizer, {root for root in roots if root is not None})
        self._gradients.finish(joined.bus, optimizer)
        if joined.world_size > 1 and optimizer not in self._compared and Need.FULL_PARAMETERS in joined.strategy.offers:
            self._compare(joined, optimizer)
        return first

    def _compare(self, joined: Joined, optimizer: torch.optim.Optimizer) -> None:
        norms = [float(each.grad.norm()) for each in _held(optimizer) if each.grad is not None]
        mine, *others = joined.bus.all_gather_object(norms)
        if any(len(each) != len(mine) or not all(map(_close, each, mine)) for each in others):
            raise WrongState(_DIFFERENT.format(type(optimizer).__name__))
        if all(map(math.isfinite, mine)):  # otherwise the loss scale is too large at first
            self._compared.add(optimizer)


def _held(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-30) or not (math.isfinite(one) or math.isfinite(other))


_UNKNOWN: Any = object()

SET_UP_ALL = "set up all modules that hold them, as in model, loss, optimizer = runtime.setup(model, loss, optimizer)"
_DIFFERENT = (
    "The gradients of {} differ between ranks: they were not averaged, so each rank would train another model. Compute losses "
    "with what setup returned, model(inputs) or model.method(inputs), and not with the module that was given to setup, and "
    "call runtime.backward(loss)."
)
