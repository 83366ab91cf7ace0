"""SOAP, from the library ``pytorch_optimizer``, which is imported when it is made."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket_general.optimizer_helpers import library


def soap(
    params: ParamsT,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10000,
    precondition_1d: bool = False,
) -> Optimizer:
    """Return Adam in the eigenbasis of Shampoo's preconditioner.

    ``pytorch_optimizer.SOAP``: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3 (arXiv
    2409.11321). The first step only initializes the preconditioner, and weights do not change. Each tensor needs its full
    gradient, so fsdp refuses it.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the means of gradients and of their squares in the eigenbasis.
        shampoo_beta: decay rate of the preconditioner; None for the second of ``betas``.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay.
        precondition_frequency: steps between updates of the eigenbasis.
        max_precondition_dim: dimensions that are longer are not preconditioned.
        precondition_1d: whether tensors of one dimension are preconditioned.

    Raises:
        ImportError: the library is not installed.

    Example:
        >>> import torch
        >>> from hocket_general import soap
        >>> optimizer = soap(torch.nn.Linear(4, 1).parameters(), lr=3e-3)
        >>> type(optimizer).__name__
        'SOAP'
    """
    made: Optimizer = library("pytorch_optimizer").SOAP(
        params,
        lr=lr,
        betas=betas,
        shampoo_beta=shampoo_beta,
        eps=eps,
        weight_decay=weight_decay,
        precondition_frequency=precondition_frequency,
        max_precondition_dim=max_precondition_dim,
        precondition_1d=precondition_1d,
    )
    return made
