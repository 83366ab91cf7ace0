"""LAMB: steps of Adam, scaled per tensor to the norm of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket_general.optimizer_helpers import check, loss_of, means, steps_of


class LAMB(Optimizer):
    """Scale each tensor's step of AdamW to the norm of its weights, for large batches.

    ``w -= lr * |w| / |u| * u``, where ``u`` is the bias-corrected step of Adam plus ``weight_decay * w``. You et al. 2020,
    "Large Batch Optimization for Deep Learning", algorithm 2 (arXiv 1904.00962), with the norm itself as phi. The ratio is
    1 where a norm is 0, and for tensors without weight decay if ``always_adapt`` is False, which leaves biases and norms to
    Adam.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the means of gradients and of their squares.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay, part of the scaled step.
        always_adapt: whether tensors without weight decay are scaled too.

    Example:
        >>> import torch
        >>> from hocket_general import LAMB
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LAMB([weight], lr=0.1)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> (torch.tensor([3.0, 4.0]) - weight.detach()).norm()  # 0.1 of the norm, 5
        tensor(0.5000)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        always_adapt: bool = True,
    ) -> None:
        check(lr, betas, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "always_adapt": always_adapt}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:  # after pickling, copying and loading
        super().__setstate__(state)
        for group in self.param_groups:
            steps = group.pop("step", None)  # of a state from before steps were counted by parameter
            for each in group["params"] if steps else ():
                if each in self.state:
                    self.state[each].setdefault("step", torch.tensor(float(steps)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step on the gradients in ``.grad``; parameters without one are skipped."""
        loss = loss_of(closure)
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if not weights:
                continue
            first, second = (means(self, weights, name) for name in ("exp_avg", "exp_avg_sq"))
            gradients = [each.grad for each in weights]
            beta1, beta2 = group["betas"]
            taken = steps_of(self, weights)
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            roots = torch._foreach_div(second, [1 - beta2**number for number in taken])
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            steps = torch._foreach_div(first, [1 - beta1**number for number in taken])
            torch._foreach_div_(steps, roots)
            if group["weight_decay"]:
                torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            if group["weight_decay"] or group["always_adapt"]:
                torch._foreach_mul_(steps, _ratios(weights, steps))
            torch._foreach_mul_(steps, group["lr"])
            torch._foreach_sub_(weights, steps)
        return loss


def _ratios(weights: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
    """Return the ratio of the norms of each pair, over all shards, or 1 where one of them is 0."""
    found: dict[Tensor, Tensor] = {}
    for device in {each.device for each in weights}:
        pairs = [pair for pair in zip(weights, steps, strict=True) if pair[0].device == device]
        of_weights, of_steps = (torch.stack(torch._foreach_norm(each)) for each in zip(*pairs, strict=True))
        ratios = torch.where((of_weights > 0) & (of_steps > 0), of_weights / of_steps, 1.0)
        found |= {weight: ratio for (weight, _), ratio in zip(pairs, ratios.unbind(), strict=True)}
    return [found[each] for each in weights]
