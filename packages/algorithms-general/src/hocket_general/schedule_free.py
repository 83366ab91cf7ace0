"""Schedule-Free AdamW and SGD, from the library ``schedulefree``, which is imported when they are made."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket_general.optimizer_helpers import library


def schedule_free_adamw(
    params: ParamsT,
    lr: float = 0.0025,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Optimizer:
    """Return AdamW that averages its weights instead of lowering the learning rate.

    ``schedulefree.AdamWScheduleFree``: Defazio et al. 2024, "The Road Less Scheduled" (arXiv 2405.15682). hocket's loop
    switches between training weights and averages: evaluation, prediction and ``trainer.model_state_dict(evaluated=True)``
    use the averages.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, constant after the warm-up; 1 to 10 times that of AdamW with a schedule.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        warmup_steps: number of steps in which the learning rate rises linearly.
        r, weight_lr_power: powers of the step and of the learning rate in the weights of the average.

    Raises:
        ImportError: the library is not installed.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="schedule-free-adamw(lr=0.01)", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ... )
        >>> result = trainer.fit("2ep")
        >>> averages = trainer.model_state_dict(evaluated=True)
    """
    made: Optimizer = library("schedulefree").AdamWScheduleFree(
        params, lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power
    )
    return made


def schedule_free_sgd(
    params: ParamsT,
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Optimizer:
    """Return SGD that averages its weights instead of lowering the learning rate.

    ``schedulefree.SGDScheduleFree``: Defazio et al. 2024, "The Road Less Scheduled", equations 2 to 4 (arXiv 2405.15682).

    Args:
        params: parameters, or groups of them.
        lr: learning rate, constant after the warm-up; 10 to 50 times that of SGD with momentum.
        momentum: interpolation between the average (1) and the fast weights (0), at which gradients are computed.
        weight_decay: L2 penalty.
        warmup_steps, r, weight_lr_power: as for `schedule_free_adamw`.

    Raises:
        ImportError: the library is not installed.

    Example:
        >>> import torch
        >>> from hocket_general import schedule_free_sgd
        >>> optimizer = schedule_free_sgd(torch.nn.Linear(4, 1).parameters(), lr=0.5)
        >>> optimizer.train()
    """
    made: Optimizer = library("schedulefree").SGDScheduleFree(
        params, lr, momentum, weight_decay, warmup_steps, r, weight_lr_power
    )
    return made
