"""Annealed Gaussian noise on gradients (Neelakantan et al. 2015, arXiv 1511.06807)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hocket import Algorithm, Event, Need, Phase, State
from torch import nn


def standard_deviation(step: int, eta: float = 0.01, gamma: float = 0.55) -> float:
    """Of the noise at a step, counted from 0: ``sqrt(eta / (1 + step) ** gamma)`` (equation 1)."""
    return float((eta / (1 + step) ** gamma) ** 0.5)


@torch.no_grad()
def add_gradient_noise(
    parameters: Iterable[nn.Parameter],
    step: int,
    eta: float = 0.01,
    gamma: float = 0.55,
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Add noise to ``.grad`` in place, in any training loop, between the backward pass and the optimizer's step.

    Args:
        parameters: parameters without a gradient are skipped, and no noise is drawn for them.
        step: optimizer steps that were taken before.
        eta, gamma: see :func:`standard_deviation`.
        generator: on the CPU; None for torch's own.
    """
    deviation = standard_deviation(step, eta, gamma)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # Drawn on the CPU, so that it does not depend on the device and is the same on every rank.
            noise = torch.randn(gradient.shape, generator=generator)
            gradient.add_(noise.to(gradient.device, gradient.dtype, non_blocking=True), alpha=deviation)


class GradientNoise(Algorithm):
    """Adds annealed Gaussian noise to the gradients of every batch (Neelakantan et al. 2015, equation 1).

    The noise of batch ``t``, counted from 0, has the variance ``eta / (1 + t) ** gamma``. It is added to the gradient
    of the whole batch, unscaled, and before gradients are clipped. Ranks add the same noise, and keep the same weights.

    Args:
        eta: the variance in the first batch, in the squared units of the gradient; the paper tries 0.01, 0.3 and 1.0.
        gamma: how fast the variance falls; 0.55 in the paper.

    Raises:
        ValueError: one of them is negative.

    Example:
        >>> import hocket, torch
        >>> from hocket_gradient_noise import GradientNoise
        >>> algorithm = GradientNoise(eta=0.01)
        >>> trainer = hocket.Trainer(torch.nn.Linear(4, 1), algorithms=[algorithm], device="cpu")
    """

    events = {Event.AFTER_TRAIN_BATCH}
    phase = Phase.GRADIENT
    before = ("gradient-clipping",)
    needs = Need.FULL_PARAMETERS  # ranks that hold shards would add the same noise to different parts

    def __init__(self, eta: float = 0.01, gamma: float = 0.55) -> None:
        if eta < 0 or gamma < 0:
            raise ValueError(
                f"eta={eta} and gamma={gamma}: neither may be negative. eta is a variance, such as 0.01, and gamma its "
                "decay, such as 0.55."
            )
        self.eta = eta
        self.gamma = gamma

    def apply(self, event: Event, state: State) -> None:
        """Add the noise of this batch."""
        add_gradient_noise(
            state.task.parameters(), state.timestamp.batch, self.eta, self.gamma, generator=state.generator(self)
        )
