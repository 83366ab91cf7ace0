"""AdamW and SGD whose weight decay does not depend on the base learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import ParamsT

from hocket.errors import WrongValue
from hocket_general.optimizer_helpers import loss_of


class _Decoupled(Optimizer):
    """Shrink weights by ``1 - weight_decay * lr / base_lr``, and let an optimizer of torch step without weight decay.

    ``base_lr`` is the learning rate that the group was made with, an option of the group that schedules do not change.
    """

    #: The class of torch.
    _steps: ClassVar[type[Adam | SGD]]

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, {**defaults, "base_lr": None})
        self._make_inner()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose base learning rate is its ``lr``. Raises ValueError for a weight decay outside [0, 1)."""
        super().add_param_group(param_group)
        _complete(group := self.param_groups[-1])
        if not 0 <= group["weight_decay"] < 1:
            raise WrongValue(
                f"«weight_decay={group['weight_decay']}» is the fraction by which weights shrink in a step: give a number in "
                "[0, 1). That of torch.optim.AdamW, times the learning rate, is the same decay."
            )

    def _make_inner(self) -> None:
        """Make torch's optimizer, which steps on the groups and the state of this one."""
        options = {name: value for name, value in self.defaults.items() if name != "base_lr"}
        self._inner = self._steps([torch.zeros(1)], **{**options, "weight_decay": 0.0})

    def __setstate__(self, state: dict[str, Any]) -> None:  # after pickling, copying and loading
        super().__setstate__(state)
        for group in self.param_groups:
            _complete(group)
        self._make_inner()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Shrink the weights that have gradients, and step on the gradients in ``.grad``."""
        loss = loss_of(closure)
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if group["weight_decay"] and group["base_lr"] and weights:
                torch._foreach_mul_(weights, 1 - group["weight_decay"] * (group["lr"] / group["base_lr"]))
        inner = self._inner
        inner.state = self.state
        inner.param_groups = [{**inner.defaults, **group, "weight_decay": 0.0} for group in self.param_groups]
        inner.step()
        return loss


def _complete(group: dict[str, Any]) -> None:
    """Set the base learning rate of a group without one: a new group, or one of a state from before this option."""
    if group.get("base_lr") is None:
        group["base_lr"] = float(group.get("initial_lr", group["lr"]))


class DecoupledAdamW(_Decoupled):
    """AdamW whose weight decay the schedule scales, and the base learning rate does not.

    Each step multiplies weights by ``1 - weight_decay * lr / base_lr`` and then is that of ``torch.optim.Adam``:
    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.
    ``base_lr`` is an option of each group, by default the ``lr`` that the group was made with, whatever a schedule such as
    OneCycleLR begins with. ``torch.optim.AdamW`` decays by ``lr * weight_decay`` instead: for the same decay at the base
    learning rate, multiply its ``weight_decay`` by the learning rate. Values of 1e-3 and more shrink weights fast.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, amsgrad: as in ``torch.optim.Adam``.
        weight_decay: fraction by which weights shrink in each step at the base learning rate.

    Example:
        >>> import torch
        >>> from hocket_general import DecoupledAdamW
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DecoupledAdamW([weight], lr=0.1, weight_decay=0.01)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.99
    """

    _steps = Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class DecoupledSGDW(_Decoupled):
    """SGD whose weight decay the schedule scales, and the base learning rate does not.

    Each step multiplies weights by ``1 - weight_decay * lr / base_lr`` and then is that of ``torch.optim.SGD``:
    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 1. ``base_lr`` is an
    option of each group, by default the ``lr`` that the group was made with. ``torch.optim.SGD`` adds ``weight_decay * w``
    to the gradient instead, which the momentum then averages.

    Args:
        params: parameters, or groups of them.
        lr, momentum, dampening, nesterov: as in ``torch.optim.SGD``.
        weight_decay: fraction by which weights shrink in each step at the base learning rate.

    Example:
        >>> import torch
        >>> from hocket_general import DecoupledSGDW
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DecoupledSGDW([weight], lr=0.1, weight_decay=0.01)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.89
    """

    _steps = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
