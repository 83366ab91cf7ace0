"""Sharpness-aware minimisation: the gradient from the worst point nearby."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.basics.dtensors import mesh_of, total_norm
from hocket.errors import WrongValue
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need
from hocket.optim.closures import needs_closure
from hocket.state.span import Span

if TYPE_CHECKING:
    from hocket.basics.time import Time
    from hocket.state.state import State


def sam_perturbation(
    gradients: Sequence[Tensor],
    rho: float = 0.05,
    epsilon: float = 1e-12,
    *,
    adaptive: Sequence[Tensor] | None = None,
    eta: float = 0.01,
) -> list[Tensor]:
    """Return the step to the worst nearby weights, ``rho * g / (||g||_2 + epsilon)``, with one norm over all gradients.

    Foret et al. 2021, "Sharpness-Aware Minimization", equation 2 with p = 2 (arXiv 2010.01412). With ``adaptive`` weights
    ``w`` the neighbourhood scales with each weight (ASAM, Kwon et al. 2021, arXiv 2102.11600): ``rho * T^2 g / (||T g||_2 +
    epsilon)``, elementwise with ``T = |w| + eta``. Computed on the device, without waiting for it. Zero gradients give a
    zero step. Collective if gradients are DTensors.

    Args:
        gradients: floating-point tensors of any shapes; left unchanged.
        rho: the L2 norm of the joint step, in the units of the weights; with ``adaptive`` that of the step divided by ``T``.
        epsilon: added to the norm.
        adaptive: the weights, one for each gradient, of its shape; None for SAM. Left unchanged.
        eta: added to the absolute weights, so that weights of 0 are perturbed, too.

    Returns:
        New tensors with the shapes, dtypes and devices of ``gradients``.

    Raises:
        ValueError: ``rho``, ``epsilon`` or ``eta`` is negative, or there are more or fewer weights than gradients.

    Example:
        >>> import torch
        >>> from hocket_general.functional import sam_perturbation
        >>> sam_perturbation([torch.tensor([3.0, 4.0])], rho=0.5)
        [tensor([0.3000, 0.4000])]
        >>> sam_perturbation([torch.tensor([3.0, 4.0])], rho=0.5, adaptive=[torch.tensor([-1.0, 0.0])], eta=0.0)
        [tensor([0.5000, 0.0000])]
    """
    if rho < 0 or epsilon < 0 or eta < 0:
        raise WrongValue(
            f"rho is {rho}, epsilon is {epsilon} and eta is {eta}, but none may be negative: rho is a distance."
        )
    if adaptive is not None and len(adaptive) != len(gradients):
        raise WrongValue(f"There are {len(adaptive)} weights for {len(gradients)} gradients: pass one for each.")
    if not gradients:
        return []
    with torch.no_grad():
        if adaptive is not None:
            scales = [weight.abs().add_(eta) for weight in adaptive]
            scaled = [gradient * scale for gradient, scale in zip(gradients, scales, strict=True)]
            steps = sam_perturbation(scaled, rho, epsilon)
            return [step.mul_(scale) for step, scale in zip(steps, scales, strict=True)]
        # A 16-bit sum of squares would overflow, and the smallest 16-bit number is far above epsilon.
        norm = total_norm([g if g.dtype.itemsize >= 4 else g.float() for g in gradients])
        scale = rho / (norm + epsilon)
        if len({(g.device, mesh_of(g)) for g in gradients}) == 1:
            return list(torch._foreach_mul(list(gradients), scale))
        return [g * scale.to(g.device) for g in gradients]


class SAM(Algorithm):
    """Step along the gradient taken at ``w + rho * g / (||g||_2 + epsilon)``.

    Foret et al. 2021, "Sharpness-Aware Minimization", equations 2 and 3 (arXiv 2010.01412); with ``adaptive`` ASAM, Kwon et
    al. 2021 (arXiv 2102.11600).

    It wraps the action ``optimizer_step``: perturb the weights along the batch's gradient, recompute the gradients of the
    same batch there, restore the weights bitwise, and let the optimizer step. The optimizer is not wrapped, so the format
    of its state and its checkpoints is that of a run without SAM. The norm is taken over the parameters of all optimizers
    of the step and the samples of all ranks, without waiting for the device.

    A batch with SAM costs two forward and backward passes, and one copy of the weights during the second one.
    ``state.loss`` stays the loss at the unperturbed weights. Batch-norm statistics see the batch a second time.

    Args:
        rho: the radius in which to search for the worst point, in the units of the weights. 0 perturbs nothing.
        epsilon: added to the norm of the gradient.
        interval: take SAM's step on every ``interval``-th batch and a plain one on the others.
        adaptive: scale the neighbourhood of each weight with it, ``w + rho * T^2 g / (||T g||_2 + epsilon)`` with ``T = |w| +
            eta``, which does not change when layers are rescaled. ``rho`` is about ten times larger then, such as 0.5.
        eta: added to the absolute weights, for ``adaptive``.
        start, stop: when to begin and to end, such as ``"0.75dur"``; see `hocket.Span`. Other steps are plain ones.

    Raises:
        ValueError: ``rho``, ``epsilon`` or ``eta`` is negative, ``interval`` is less than 1, or ``stop`` is not after
            ``start``; later, for an optimizer such as LBFGS that computes gradients itself and would ignore SAM's.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, algorithms=[hocket_general.SAM(rho=0.05)],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.BEFORE_LOAD}
    phase = Phase.OPTIMIZER
    needs = Need.SECOND_GRADIENT

    def __init__(
        self,
        rho: float = 0.05,
        epsilon: float = 1e-12,
        interval: int = 1,
        adaptive: bool = False,
        eta: float = 0.01,
        start: str | Time | None = None,
        stop: str | Time | None = None,
    ) -> None:
        if rho < 0 or epsilon < 0 or eta < 0:
            raise WrongValue(
                f"SAM was given «rho={rho}», «epsilon={epsilon}» and «eta={eta}», but none may be negative: rho is a distance "
                f"between weights, such as 0.05."
            )
        if interval < 1:
            raise WrongValue(
                f"SAM was given «interval={interval}»: give 1 for every batch, 2 for every second one, and so on."
            )
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval
        self.adaptive = adaptive
        self.eta = eta
        self._span = Span(start, stop)

    def apply(self, event: Event, state: State) -> None:
        """Refuse optimizers on which SAM would have no effect."""
        for optimizer in state.optimizers:
            if needs_closure(optimizer):
                raise WrongValue(
                    f"SAM leaves its gradients for the optimizer to step with, but {type(optimizer).__name__} computes "
                    "gradients itself, so SAM would have no effect. Remove SAM, or choose an optimizer such as SGD or AdamW."
                )

    def no_effect(self, state: State) -> str:
        """Return that no batch of the span is an ``interval``-th one, if so."""
        batches = self._span.batches(state)
        if batches is None or batches.start + -(batches.start + 1) % self.interval < batches.stop:
            return ""
        return f"none of its {len(batches)} batches is an interval={self.interval}-th one. Give a smaller interval."

    @hookimpl(wrapper=True)
    def optimizer_step(self, state: State, closure: Callable[[], Tensor]) -> Generator[None, bool, bool]:
        """Replace the gradients by those at the perturbed weights, then step."""
        if (state.timestamp.batch + 1) % self.interval == 0 and self._span.includes(state):
            self._sharpen(state, closure)
        return (yield)

    def _sharpen(self, state: State, closure: Callable[[], Tensor]) -> None:
        parameters: list[Tensor] = [p for p in state.trained_parameters() if p.grad is not None]
        if not parameters:
            return  # there are no gradients; the optimizer decides how to handle such a step
        loss, parts = state.loss, state.loss_parts
        with torch.no_grad():
            # Copies, because (w + e) - e is not w in floating point.
            weights = [p.detach().clone() for p in parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            scaled_by = weights if self.adaptive else None
            steps = sam_perturbation(gradients, self.rho, self.epsilon, adaptive=scaled_by, eta=self.eta)
            torch._foreach_add_(parameters, steps)
            del steps  # frees memory for the second backward pass
        try:
            closure()
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)  # not fused: shards cannot be copied that way
            state.loss, state.loss_parts = loss, parts
