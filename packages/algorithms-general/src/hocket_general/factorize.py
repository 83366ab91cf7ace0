"""Factorize: replace large layers by two thin ones, the best low-rank approximation of their weights.

Sources: Eckart and Young 1936, "The approximation of one matrix by another of lower rank", Psychometrika 1, doi
10.1007/BF02288367, for the singular value decomposition; Zhang et al. 2016, "Accelerating Very Deep Convolutional Networks",
arXiv 1505.06798, for the layout of a factorized convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.surgery import Replacement
from hocket_general.module_substitution import Substitution, SurgeryAlgorithm, not_plain

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``up`` ``(m, rank)`` and ``down`` ``(rank, n)``, whose product is the closest to ``weight`` ``(m, n)``.

    The truncated singular value decomposition, closest in the Frobenius and in the spectral norm (Eckart and Young 1936).
    The singular values are divided evenly between the two: ``up.T @ up`` equals ``down @ down.T``. Computed in at least
    float32, returned in the dtype of ``weight``.

    Raises:
        ValueError: ``rank`` is not between 1 and ``min(m, n)``.

    Example:
        >>> import torch
        >>> from hocket_general.functional import low_rank_factors
        >>> weight = torch.outer(torch.arange(3.0), torch.arange(4.0))  # of rank 1
        >>> up, down = low_rank_factors(weight, rank=1)
        >>> torch.allclose(up @ down, weight, atol=1e-6)
        True
    """
    if not 1 <= rank <= min(weight.shape):
        raise WrongValue(
            f"«rank={rank}» is not between 1 and {min(weight.shape)}, for a weight of {tuple(weight.shape)}."
        )
    with torch.no_grad():
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        roots = values[:rank].sqrt()
        return (left[:, :rank] * roots).to(weight.dtype), (roots[:, None] * right[:rank]).to(weight.dtype)


def largest_useful_rank(fan_in: int, fan_out: int) -> int:
    """Return the largest rank at which two factors have fewer weights than a ``(fan_out, fan_in)`` matrix; 0 if none has.

    Example:
        >>> from hocket_general.functional import largest_useful_rank
        >>> largest_useful_rank(512, 512), largest_useful_rank(64 * 3 * 3, 64), largest_useful_rank(4, 4)
        (255, 57, 1)
    """
    return -(-fan_in * fan_out // (fan_in + fan_out)) - 1


class _Factorized(nn.Module):
    """``up(down(input))``; reads as one layer: ``weight`` is the product of both, ``bias`` that of ``up``."""

    down: Any
    up: Any
    rank: int

    def extra_repr(self) -> str:
        return f"rank={self.rank}"

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(input))
        return out

    @property
    def weight(self) -> Tensor:
        """The product of the factors, in the shape of the replaced weight."""
        down = self.down.weight
        product: Tensor = (self.up.weight.flatten(1) @ down.flatten(1)).unflatten(1, down.shape[1:])
        return product

    @property
    def bias(self) -> Tensor | None:
        """The bias of the replaced layer."""
        bias: Tensor | None = self.up.bias
        return bias


class FactorizedLinear(_Factorized):
    """Two linear layers in place of one, through ``rank`` features; the first has no bias."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = linear.in_features, linear.out_features, rank
        up, down = low_rank_factors(linear.weight, rank)
        self.down = nn.Linear(linear.in_features, rank, bias=False, device="meta")
        self.up = nn.Linear(rank, linear.out_features, linear.bias is not None, device="meta")
        _fill(self, linear, up, down)


class FactorizedConv(_Factorized):
    """A convolution to ``rank`` channels, without bias, and a pointwise one, in place of one convolution."""

    def __init__(self, conv: Any, rank: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.rank = conv.in_channels, conv.out_channels, rank
        self.kernel_size, self.stride, self.padding = conv.kernel_size, conv.stride, conv.padding
        up, down = low_rank_factors(conv.weight.flatten(1), rank)
        geometry = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        self.down = type(conv)(conv.in_channels, rank, conv.kernel_size, bias=False, device="meta", **geometry)
        self.up = type(conv)(rank, conv.out_channels, 1, bias=conv.bias is not None, device="meta")
        _fill(self, conv, up, down)


def _fill(new: Any, old: Any, up: Tensor, down: Tensor) -> None:
    for part, values in ((new.up, up), (new.down, down)):
        values = values.reshape(part.weight.shape)
        last = values.ndim == 4 and not old.weight.is_contiguous()
        values = values.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        part.weight = nn.Parameter(values, requires_grad=old.weight.requires_grad)
    new.up.bias = old.bias


@dataclass(frozen=True)
class _Rule(Substitution):
    factorize_convs: bool
    factorize_linears: bool
    min_channels: int
    latent_channels: float
    min_features: int
    latent_features: float

    method = "Factorize"
    becomes = "factorized"
    made = _Factorized

    def __post_init__(self) -> None:
        if not (self.factorize_convs or self.factorize_linears):
            raise WrongValue(
                "Factorize has nothing to replace: factorize_convs and factorize_linears are both False. Set one to True, or "
                "remove Factorize."
            )
        for name in ("latent_channels", "latent_features"):
            value = getattr(self, name)
            if not (0 < value < 1 or (value >= 1 and value == int(value))):
                raise WrongValue(
                    f"Factorize was given {name}={value}: give a fraction of the smaller side below 1, such as 0.25, or a "
                    "whole number such as 128."
                )

    @property
    def nothing(self) -> str:  # type: ignore[override]
        return (
            f"no Linear of at least {self.min_features} features and no convolution of at least {self.min_channels} channels "
            "that two factors make smaller. Lower min_features, min_channels or the latent sizes, or remove Factorize."
        )

    def rank(self, module: Any) -> int:
        """Return the rank of the factors of a Linear or convolution."""
        latent = self.latent_features if isinstance(module, nn.Linear) else self.latent_channels
        return int(latent) if latent >= 1 else max(1, int(latent * min(_sides(module))))

    def wants(self, module: nn.Module) -> bool:
        if isinstance(module, nn.Linear):
            wanted, least = self.factorize_linears, self.min_features
        elif isinstance(module, _CONVS):
            wanted, least = self.factorize_convs and module.groups == 1, self.min_channels
        else:
            return False
        sides = _sides(module)
        fan_in = sides[0] * math.prod(getattr(module, "kernel_size", ()))
        return wanted and min(sides) >= least and self.rank(module) <= largest_useful_rank(fan_in, sides[1])

    def choose(self, model: nn.Module) -> dict[nn.Module, str]:
        inside = {part for whole in model.modules() if isinstance(whole, _Factorized) for part in whole.children()}
        users: dict[Any, int] = {}
        for part in model.modules():
            for parameter in part.parameters(recurse=False):
                users[parameter] = users.get(parameter, 0) + 1
        return {
            part: obstacle or ("its weight is shared with another module" if users.get(part.weight, 0) > 1 else "")
            for part, obstacle in super().choose(model).items()
            if part not in inside
        }

    def obstacle(self, module: nn.Module) -> str:
        if module._parameters.get("weight") is None:
            return "its weight is computed by a hook or a parametrization"
        return not_plain(module, (nn.Linear, *_CONVS))

    def build(self, module: Any) -> nn.Module:
        kind = FactorizedLinear if isinstance(module, nn.Linear) else FactorizedConv
        return kind(module, self.rank(module))


def _sides(module: Any) -> tuple[int, int]:
    linear = isinstance(module, nn.Linear)
    return (module.in_features, module.out_features) if linear else (module.in_channels, module.out_channels)


def factorize(
    model: nn.Module,
    *,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 256,
    latent_channels: float = 0.25,
    min_features: int = 256,
    latent_features: float = 0.25,
) -> tuple[nn.Module, list[Replacement]]:
    """Replace large ``Linear``, ``Conv1d``, ``Conv2d`` and ``Conv3d`` by two thin layers each, in place.

    The factors are the best approximation of the layer's *current* weight by their rank (:func:`low_rank_factors`), so a
    pretrained model keeps what its largest singular values hold. ``Linear`` becomes ``in -> rank -> out``; a convolution
    becomes the same convolution to ``rank`` channels and a pointwise one. The bias stays the same parameter.

    A layer is replaced if both of its sides have the least size and the two factors have fewer weights than it
    (:func:`largest_useful_rank`). Grouped convolutions are not replaced. Subclasses, which may define their own forward, and
    weights that are shared or computed are left alone; a warning names them.

    Args:
        model: any module; only its submodules are replaced.
        factorize_convs, factorize_linears: which of the two to replace.
        min_channels, min_features: minimum of input and output channels, or features, of a layer to replace.
        latent_channels, latent_features: the rank; below 1, as a fraction of the smaller side, rounded down, at least 1.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: both kinds are excluded, or a rank is neither a fraction nor a positive whole number.
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> import torch
        >>> from hocket_general.functional import factorize
        >>> model, changed = factorize(torch.nn.Sequential(torch.nn.Linear(512, 512)))
        >>> model[0].rank, model[0].weight.shape
        (128, torch.Size([512, 512]))
    """
    rule = _Rule(factorize_convs, factorize_linears, min_channels, latent_channels, min_features, latent_features)
    return model, rule.operate(model)


class Factorize(SurgeryAlgorithm):
    """Replace large layers by low-rank factors of their weights (Eckart and Young 1936; Zhang et al. 2016, arXiv 1505.06798).

    Replaces layers of the model, once, before optimizers exist. The arguments are those of :func:`factorize`. Logs the
    number of replaced layers as ``factorize/modules``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_general.Factorize()], device="cpu")
        >>> sum(parameter.numel() for parameter in model[0].parameters())  # instead of 65,792
        33024
    """

    before = ("blurpool", "squeeze-excite", "weight-standardization")  # after which convolutions are not torch's own

    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: float = 0.25,
        min_features: int = 256,
        latent_features: float = 0.25,
    ) -> None:
        self.substitution = _Rule(
            factorize_convs, factorize_linears, min_channels, latent_channels, min_features, latent_features
        )
