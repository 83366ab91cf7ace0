"""Lion: steps in the direction of the sign of a mean of gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket_general.optimizer_helpers import check, loss_of, means


class Lion(Optimizer):
    """Step by the sign of an interpolation of momentum and gradient.

    ``w -= lr * (sign(c) + weight_decay * w)``. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm
    2 (arXiv 2302.06675). Every element moves by ``lr``, so the learning rate is 3 to 10 times smaller than AdamW's, and the
    weight decay that much larger (section 5). The state is one tensor per parameter, half of AdamW's.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: the weight of the momentum in the step, and its decay rate.
        weight_decay: decoupled weight decay.

    Example:
        >>> import torch
        >>> from hocket_general import Lion
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Lion([weight], lr=0.1)
        >>> weight.grad = torch.tensor([5.0, -0.1])
        >>> optimizer.step()
        >>> weight.tolist()
        [-0.1..., 0.1...]
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        check(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step on the gradients in ``.grad``; parameters without one are skipped."""
        loss = loss_of(closure)
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if not weights:
                continue
            gradients, momenta = [each.grad for each in weights], means(self, weights, "exp_avg")
            beta1, beta2 = group["betas"]
            steps = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(steps, group["lr"])
            torch._foreach_sub_(weights, steps)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss
