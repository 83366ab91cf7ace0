"""Gradient clipping by norm, by value, or relative to the weights."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Literal

from hocket.errors import WrongValue
from hocket.hookspecs import hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.optim.clipping import clip_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.state.state import State

_KINDS = ("norm", "value", "adaptive")


class GradientClipping(Algorithm):
    """Clip the gradients of every batch before the optimizer steps; wraps the action ``clip_gradients``.

    The gradients of all optimizers of the step are clipped together. Several instances clip one after the other, in the
    order in which they are named, before the Trainer's own ``clip_gradients=``: by value and then by norm, for example.

    Args:
        kind: ``"norm"`` scales all gradients by one factor so that their joint L2 norm is at most ``threshold``
            (Pascanu et al. 2013, algorithm 1, arXiv 1211.5063); ``"value"`` clamps every element to
            [-threshold, threshold]; ``"adaptive"`` bounds the norm of a unit's gradient by ``threshold`` times that of
            its weights (Brock et al. 2021, equation 3, arXiv 2102.06171).
        threshold: positive; in the units of the gradient, or for ``"adaptive"`` a ratio.

    Raises:
        ValueError: an unknown ``kind``, or a ``threshold`` that is not positive.

    Example:
        >>> import hocket, hocket_general, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_general.GradientClipping("norm", 1.0)], device="cpu")
    """

    phase = Phase.GRADIENT

    def __init__(self, kind: Literal["norm", "value", "adaptive"], threshold: float) -> None:
        if kind not in _KINDS:
            raise WrongValue(f"GradientClipping was given «kind={kind!r}»: give one of {', '.join(map(repr, _KINDS))}.")
        if not threshold > 0:
            raise WrongValue(
                f"GradientClipping was given «threshold={threshold}», which lets no gradient through: give a positive "
                f"number, such as 1.0 for «kind='norm'» or 0.01 for «kind='adaptive'»."
            )
        self.kind = kind
        self.threshold = threshold

    @hookimpl(wrapper=True)
    def clip_gradients(self, state: State) -> Generator[None, Tensor | bool, Tensor | bool]:
        """Clip in place; return the total norm before clipping if this or the next implementation computed it."""
        norm = clip_gradients(state.trained_parameters(), self.kind, self.threshold)
        others = yield
        return others if norm is None else norm
