"""Weight standardization: convolutions whose filters have mean 0 and variance 1.

Source: Qiao et al. 2019, "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
arXiv 1903.10520.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from hocket.errors import WrongValue
from hocket.surgery import Replacement, recast
from hocket_general.module_substitution import Substitution, SurgeryAlgorithm

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def standardize_weight(weight: Tensor, epsilon: float = 1e-10) -> Tensor:
    """Return ``(w - mean) / sqrt(variance + epsilon)`` of each filter ``weight[i]``, with the biased variance.

    ``(out, in, ...) -> (out, in, ...)``. Computed in at least float32, returned in the dtype of ``weight``.
    Qiao et al. 2019 (arXiv 1903.10520).

    Example:
        >>> import torch
        >>> from hocket_general.functional import standardize_weight
        >>> standardize_weight(torch.tensor([[[1.0, 3.0]]]))
        tensor([[[-1.,  1.]]])
    """
    wide = weight if weight.dtype.itemsize >= 4 else weight.float()
    dims = tuple(range(1, weight.ndim))
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + epsilon)).to(weight.dtype)


class _Standardized(_ConvNd):
    """Standardizes the weight of the convolution that is its other base class, each time it convolves."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, standardize_weight(weight), bias)  # type: ignore[misc]  # of Conv1d, 2d, 3d

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, (type(self).__bases__[1],), self.__getstate__()


@functools.cache
def _standardized(kind: Any) -> type[_Standardized]:
    return type(f"Standardized{kind.__name__}", (_Standardized, kind), {"__module__": __name__})


def _new(kind: Any) -> _Standardized:
    made = _standardized(kind)
    return made.__new__(made)


def _convolves_as_torch(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of a class ends in torch's: inherited, or called with ``super().forward``."""
    if kind._conv_forward not in [torchs._conv_forward for torchs in _KINDS]:  # type: ignore[attr-defined]
        return False
    forwards = [vars(base)["forward"] for base in kind.__mro__ if base not in _KINDS and "forward" in vars(base)]
    codes = [getattr(forward, "__code__", None) for forward in forwards if forward is not nn.Module.forward]
    return all(code and "__class__" in code.co_freevars and "forward" in code.co_names for code in codes)


@dataclass(frozen=True)
class _Rule(Substitution):
    n_last_layers_ignore: int

    method = "WeightStandardization"
    becomes = "with standardized weights"
    made = _Standardized

    def __post_init__(self) -> None:
        if self.n_last_layers_ignore < 0:
            raise WrongValue(
                f"WeightStandardization was given «n_last_layers_ignore={self.n_last_layers_ignore}»: give 0 or the number of "
                "last convolutions to leave alone."
            )

    @property
    def nothing(self) -> str:  # type: ignore[override]
        ignored = f" before the last {self.n_last_layers_ignore}" if self.n_last_layers_ignore else ""
        return f"no Conv1d, Conv2d or Conv3d{ignored}. Remove WeightStandardization."

    def wants(self, module: nn.Module) -> bool:
        return isinstance(module, _KINDS)

    def choose(self, model: nn.Module) -> dict[nn.Module, str]:
        chosen = super().choose(model)
        ours = list(chosen)[: max(0, len(chosen) - self.n_last_layers_ignore)]
        return {part: chosen[part] for part in ours if not isinstance(part, _Standardized)}

    def obstacle(self, module: nn.Module) -> str:
        if isinstance(module, LazyModuleMixin):
            return f"{type(module).__name__}, which does not know its shape before its first batch"
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed by a hook or a parametrization"
        if not _convolves_as_torch(type(module)):
            return f"{type(module).__name__}, whose forward may not convolve as torch's does"
        if weight[0].numel() == 1:
            return "its filters have one weight, which standardized is 0"
        return ""

    def build(self, module: Any) -> nn.Module:
        kind: Any = type(module)
        return recast(module, _standardized(kind))


def weight_standardization(model: nn.Module, *, n_last_layers_ignore: int = 0) -> tuple[nn.Module, list[Replacement]]:
    """Let ``Conv1d``, ``Conv2d`` and ``Conv3d`` convolve with standardized weights, in place.

    The weight is standardized each time the layer convolves (:func:`standardize_weight`); what is trained and saved is the
    weight itself, the same object under the same name. So checkpoints load with and without this method, but the model
    computes something else: apply it before training, and whenever the model is used.

    Subclasses of the three are standardized too if their forward pass ends in torch's ``forward``. Others, lazy ones,
    weights that a parametrization computes, and filters of one weight are left alone; a warning names them.

    Qiao et al. 2019, "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization" (arXiv 1903.10520).

    Args:
        model: any module; only its submodules are replaced.
        n_last_layers_ignore: number of convolutions to leave alone, counted from the last one that the model registers.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: ``n_last_layers_ignore`` is negative.
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> import torch
        >>> from hocket_general.functional import weight_standardization
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
        >>> model, changed = weight_standardization(model)
        >>> len(changed), list(model.state_dict())
        (2, ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    return model, _Rule(n_last_layers_ignore).operate(model)


class WeightStandardization(SurgeryAlgorithm):
    """Convolve with filters of mean 0 and variance 1 (Qiao et al. 2019, arXiv 1903.10520).

    Replaces convolutions of the model, once; see :func:`weight_standardization`. Logs the number of replaced layers as
    ``weight-standardization/modules``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_general.WeightStandardization()], device="cpu")
        >>> type(model[0]).__name__
        'StandardizedConv2d'
    """

    after = ("blurpool", "squeeze-excite")  # which look for convolutions of torch's own classes

    def __init__(self, n_last_layers_ignore: int = 0) -> None:
        self.substitution = _Rule(n_last_layers_ignore)
