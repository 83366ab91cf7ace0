"""The layers of stochastic depth: a residual block whose branch is dropped at random in training."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket_vision.extended_forward import Extension
from hocket_vision.residual_blocks import Residual, end_of

Method = Literal["block", "sample"]


class BranchDrop(nn.Module):
    """The state of one block: its drop rate, and what was decided for the current forward pass.

    In training without a ``decision`` it draws from torch's default generators, as dropout does.
    """

    def __init__(self, name: str, rate: float, method: Method, rescale: bool, residual: Residual | None) -> None:
        super().__init__()
        self.name, self.rate, self.method, self.rescale, self.residual = name, rate, method, rescale, residual
        #: Whether to keep the branch, or a bool tensor of that for each sample; None to draw.
        self.decision: bool | Tensor | None = None

    def skips(self) -> bool:
        """Whether to skip the branch in this forward pass."""
        if not self.training or self.method == "sample":
            return False
        if self.decision is None:
            return torch.rand(()).item() < self.rate
        return not self.decision

    def factor(self, branch: Tensor) -> Tensor | float | None:
        """Return the factor of a branch that is not skipped: a number, or 0 and others by sample; None for 1.

        In training that is 1 or 0, and in evaluation ``1 - rate`` (equation 5). With ``rescale`` it is ``1 / (1 - rate)``
        or 0, and 1.
        """
        if not self.training:
            return None if self.rescale or not self.rate else 1 - self.rate
        if self.method == "block":
            return 1 / (1 - self.rate) if self.rescale and self.rate else None
        keep = self.decision
        if not isinstance(keep, Tensor):
            keep = torch.rand(len(branch), device=branch.device) >= self.rate
        if len(keep) != len(branch):
            raise WrongValue(
                f"Stochastic depth drops by sample, and the batch has {len(keep)} samples, but {self.name} was given "
                f"{len(branch)} along dimension 0. Use «method='block'», or blocks whose dimension 0 is the samples."
            )
        factor = keep.to(branch.dtype).reshape(-1, *(1,) * (branch.dim() - 1))
        return factor / (1 - self.rate) if self.rescale else factor

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, method={self.method!r}" + (", rescale=True" if self.rescale else "")


class WithStochasticDepth(Extension):
    """A residual block whose branch its ``stochastic_depth``, a `BranchDrop`, drops at random in training."""

    stochastic_depth: BranchDrop

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        drop = self.stochastic_depth
        if drop.skips():
            return _with_zero_gradients(_shortcut(self, input, drop.residual), self.parameters())
        out: Tensor = super().forward(input, *args, **kwargs)
        if drop.residual is not None:
            return out  # a hook on the end of the branch has scaled it
        if drop.training and (not isinstance(out, Tensor) or out.shape != input.shape):
            found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise WrongValue(
                f"Stochastic depth needs blocks that return their input plus a residual branch, but {drop.name} returned "
                f"{found} for an input of shape {tuple(input.shape)}. Choose others with blocks=, such as «blocks='*Block'»."
            )
        factor = drop.factor(out)
        if isinstance(factor, Tensor):
            return torch.lerp(input.to(out.dtype), out, factor)  # exact for 0 and 1
        return out if factor is None else input + factor * (out - input)


def _shortcut(block: nn.Module, input: Tensor, residual: Residual | None) -> Tensor:
    if residual is None:
        return input
    shortcut, activation = getattr(block, residual.shortcut), getattr(block, residual.activation)
    out: Tensor = activation(input.clone() if shortcut is None else shortcut(input))  # it may act in place
    return out


def plain_class(block: nn.Module) -> type[nn.Module]:
    """Return the class of a block without stochastic depth."""
    return block.parts[1] if isinstance(block, WithStochasticDepth) else type(block)


def scale_end(block: nn.Module, drop: BranchDrop) -> None:
    """Have the last module of the branch scale its output, where the parts of the block are known."""
    if drop.residual is not None:
        block.get_submodule(end_of(block, drop.residual)).register_forward_hook(partial(_scale, drop))


def _scale(drop: BranchDrop, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Scale the end of a branch: a forward hook of its last module."""
    factor = drop.factor(output)
    return None if factor is None else output * factor


def _with_zero_gradients(output: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return ``output`` as a function of ``parameters`` with gradient 0: a skipped block keeps no rank waiting."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not trained:
        return output
    out: Tensor = _ZeroGradients.apply(output, *trained)  # type: ignore[no-untyped-call]
    return out


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output.clone()  # not a view, which the next module could not change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.parameters)
