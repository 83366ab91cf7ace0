"""Squeeze-and-excitation: weight the channels of feature maps by what the whole image holds.

Source: Hu, Shen, Albanie, Sun and Wu 2018, "Squeeze-and-Excitation Networks", arXiv 1709.01507, equations 2 to 4. A gate on
every wide convolution, rather than one on each residual branch, is MosaicML Composer's variant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policies, Policy, Replacement, preview, replace_modules, why_no_effect
from hocket_vision.extended_forward import Extension, extended

if TYPE_CHECKING:
    from hocket.state.state import State


class SqueezeExcite2d(nn.Module):
    """Multiply each channel by ``sigmoid(W2 relu(W1 z))``, where ``z`` is the mean of each channel over the pixels.

    ``(..., C, H, W) -> (..., C, H, W)`` in the same dtype and memory format (arXiv 1709.01507, equations 2 to 4). There are
    no biases. Weights are drawn as those of :class:`torch.nn.Linear`.

    Args:
        channels: number of channels ``C``.
        latent_channels: rows of ``W1``: a number, or a fraction below 1 of ``channels`` (rounded down, at least 1).
        start_as_identity: multiply by ``2 * sigmoid(...)`` and start with ``W2 = 0``: a factor of exactly 1 at first.
        generator: source of the initial weights; torch's default generator if None.

    Raises:
        ValueError: ``latent_channels`` is not positive, or a number above 1 that is not whole.

    Example:
        >>> import torch
        >>> from hocket_vision import SqueezeExcite2d
        >>> SqueezeExcite2d(channels=32, latent_channels=1 / 16)(torch.rand(2, 32, 8, 8)).shape
        torch.Size([2, 32, 8, 8])
    """

    def __init__(
        self,
        channels: int,
        latent_channels: float = 64,
        start_as_identity: bool = False,
        *,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        latent = latent_width(latent_channels, channels)
        self.start_as_identity = start_as_identity
        self.squeeze = nn.Parameter(torch.empty(latent, channels, device=device, dtype=dtype))
        self.excite = nn.Parameter(torch.empty(channels, latent, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights."""
        nn.init.kaiming_uniform_(self.squeeze, a=math.sqrt(5), generator=generator)
        if self.start_as_identity:
            nn.init.zeros_(self.excite)
        else:
            nn.init.kaiming_uniform_(self.excite, a=math.sqrt(5), generator=generator)

    def forward(self, input: Tensor) -> Tensor:
        latent = F.relu(F.linear(input.mean((-2, -1)), self.squeeze))
        factors = torch.sigmoid(F.linear(latent, self.excite))
        if self.start_as_identity:
            factors = 2 * factors
        return input * factors[..., None, None]

    def extra_repr(self) -> str:
        latent, channels = self.squeeze.shape
        identity = ", start_as_identity=True" if self.start_as_identity else ""
        return f"{channels}, latent_channels={latent}{identity}"


def latent_width(latent_channels: float, channels: int) -> int:
    """Return the number of latent channels. Raises ValueError for an invalid number or fraction."""
    if not latent_channels > 0 or (latent_channels >= 1 and latent_channels != int(latent_channels)):
        raise WrongValue(
            f"latent_channels is {latent_channels}: give a whole number such as 64, or a fraction of the channels below 1 such "
            "as 0.0625 (1/16, the paper's)."
        )
    return int(latent_channels) if latent_channels >= 1 else max(1, int(latent_channels * channels))


class WithSqueezeExcite(Extension):
    """A convolution whose output goes through its ``squeeze_excite``, a :class:`SqueezeExcite2d`."""

    squeeze_excite: SqueezeExcite2d

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.squeeze_excite(super().forward(input))
        return out


@dataclass(frozen=True)
class _Choice:
    """The convolutions to extend, and how."""

    latent_channels: float
    min_channels: int
    start_as_identity: bool

    def __post_init__(self) -> None:
        latent_width(self.latent_channels, 1)

    def wants(self, conv: nn.Conv2d) -> bool:
        ready = not isinstance(conv, WithSqueezeExcite | LazyModuleMixin)
        return ready and min(conv.in_channels, conv.out_channels) >= self.min_channels

    def policies(self, generator: torch.Generator | None = None) -> Policies:
        def build(conv: nn.Conv2d, index: int) -> nn.Module:
            new = extended(conv, WithSqueezeExcite)
            new.squeeze_excite = SqueezeExcite2d(
                conv.out_channels, self.latent_channels, self.start_as_identity, generator=generator
            )
            return new

        return {nn.Conv2d: Policy(build, self.wants)}


def squeeze_excite(
    model: nn.Module,
    *,
    latent_channels: float = 64,
    min_channels: int = 128,
    start_as_identity: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, list[Replacement]]:
    """Put a :class:`SqueezeExcite2d` behind every ``Conv2d`` of at least ``min_channels`` input and output channels.

    In place. A convolution keeps its class (the new one is a subclass), parameters (the same objects), hooks and names in the
    ``state_dict``. The new weights are ``<name>.squeeze_excite.squeeze`` and ``<name>.squeeze_excite.excite``. Lazy
    convolutions, which do not know their channels, are left as they are.

    Args:
        model: any module; only its submodules are replaced.
        latent_channels: width of the bottleneck: a number, or a fraction below 1 of the convolution's output channels.
        min_channels: minimum number of input and of output channels of a convolution.
        start_as_identity: keep the model's function at first, for pretrained models; otherwise each gate starts at
            about 1/2. See :class:`SqueezeExcite2d`.
        generator: source of the new weights; torch's default generator if None.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning. Add the new
        parameters to an existing optimizer with `hocket.surgery.update_optimizer`.

    Raises:
        ValueError: ``latent_channels`` is not positive, or a number above 1 that is not whole.
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> from hocket_vision import small_resnet
        >>> from hocket_vision.functional import squeeze_excite
        >>> model, replaced = squeeze_excite(small_resnet(), latent_channels=1 / 16, min_channels=64)
        >>> print(replaced[0])
        stage3.0.conv2: Conv2d -> Conv2dWithSqueezeExcite
    """
    return model, _operate(model, _Choice(latent_channels, min_channels, start_as_identity), generator)


def _operate(model: nn.Module, choice: _Choice, generator: torch.Generator | None) -> list[Replacement]:
    changed = replace_modules(model, choice.policies(generator))
    if not changed:
        lacking = (
            f"no Conv2d of at least {choice.min_channels} input and output channels. Lower min_channels, or remove "
            "squeeze-excite."
        )
        gates = {
            f"{name}.squeeze_excite": part.squeeze_excite
            for name, part in model.named_modules()
            if isinstance(part, WithSqueezeExcite)
        }
        warn(why_no_effect("Squeeze-excite", model, lacking, gates), NoEffectWarning)
    return changed


class SqueezeExcite(Algorithm):
    """Weight channels by the content of the whole image (Hu et al. 2018, arXiv 1709.01507).

    Puts a gate behind every wide convolution, once, before optimizers exist. The arguments are those of
    :func:`squeeze_excite`; the new weights come from the run's seed. Logs the number of gates as ``squeeze-excite/layers``.

    Example:
        >>> import hocket, hocket_vision
        >>> gates = hocket_vision.SqueezeExcite(latent_channels=1 / 16, min_channels=64, start_as_identity=True)
        >>> model = hocket_vision.small_resnet()
        >>> trainer = hocket.Trainer(model=model, algorithms=[gates], device="cpu")
        >>> sum(isinstance(module, hocket_vision.SqueezeExcite2d) for module in model.modules())
        1
    """

    events = {Event.INIT}
    phase = Phase.MODEL
    after = ("blurpool",)  # which replaces plain convolutions only

    def __init__(self, latent_channels: float = 64, min_channels: int = 128, start_as_identity: bool = False) -> None:
        self._choice = _Choice(latent_channels, min_channels, start_as_identity)

    def apply(self, event: Event, state: State) -> None:
        """Extend convolutions of the model."""
        changed = _operate(state.model, self._choice, state.generator(self))
        state.replacements += changed
        state.log({"squeeze-excite/layers": len(changed)})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each convolution that would get a gate."""
        return [f"{name}: Conv2d with a squeeze-excite gate" for name in preview(model, self._choice.policies())]
