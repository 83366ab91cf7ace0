"""The image operations of AugMix and RandAugment, on batches: one definition of each, and of how its strength is drawn.

Sources: the operations and their strengths are those of the code of Hendrycks et al. 2020 (arXiv 1912.02781); the factors of
"color", "contrast", "brightness" and "sharpness" in both directions are MosaicML Composer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hocket_vision import kernels

AugmentationSet = Literal["all", "safe", "original", "tone"]


class Draw(NamedTuple):
    """The random part of a strength, explicitly.

    ``u`` places the strength in its range: uniform in [0, 1), or 1 for the strongest. ``up`` is its sign, or for a factor
    whether it is above 1.
    """

    u: float
    up: bool
    severity: float
    height: int
    width: int

    def level(self) -> float:
        return self.severity - (self.severity - 0.1) * (1 - self.u)

    def signed(self, amount: float) -> float:
        return amount if self.up else -amount

    def factor(self) -> float:
        return 1 + (self.severity - 1) * self.u if self.up else 1 - 0.09 * self.severity * self.u

    def brightness(self) -> float:
        factor = self.factor()
        return 0.75 * factor if factor > 1 else factor

    def original_factor(self) -> float:
        return self.level() * 0.18 + 0.1


#: ``(n, C, H, W)`` images and their amounts -> images of the same shape and dtype. The amounts are strengths
#: ``(n, 1, 1, 1)``, or for `warp` and `shift` the matrices ``(n, 6)``.
Kernel = Callable[[Tensor, Tensor], Tensor]
#: Strength, height and width -> ``a, b, c, d, e, f``: see `hocket_vision.kernels.warp`.
Matrix = Callable[[float, int, int], tuple[float, ...]]


class Operation(NamedTuple):
    """How a strength follows from a draw, and what it does: a kernel for tones, or a matrix for geometry."""

    strength: Callable[[Draw], float]
    kernel: Kernel | None = None
    matrix: Matrix | None = None


def _rotation(degrees: float, height: int, width: int) -> tuple[float, ...]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = width / 2, height / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


# --- the operations: level / 10 of posterize 4 bits, rotate 30°, solarize 256, shear 0.3, translate a third of the side

_SAFE = {
    "autocontrast": Operation(lambda draw: 0.0, kernels.autocontrast),
    "equalize": Operation(lambda draw: 0.0, kernels.equalize),
    "posterize": Operation(lambda draw: max(1, 4 - int(draw.level() * 0.4)), kernels.posterize),
    "rotate": Operation(lambda draw: draw.signed(int(draw.level() * 3)), matrix=_rotation),
    "solarize": Operation(lambda draw: 256 - int(draw.level() * 25.6), kernels.solarize),
    "shear_x": Operation(lambda draw: draw.signed(draw.level() * 0.03), matrix=lambda s, h, w: (1, s, 0, 0, 1, 0)),
    "shear_y": Operation(lambda draw: draw.signed(draw.level() * 0.03), matrix=lambda s, h, w: (1, 0, 0, s, 1, 0)),
    "translate_x": Operation(
        lambda draw: draw.signed(int(draw.level() * draw.width / 30)), matrix=lambda s, h, w: (1, 0, s, 0, 1, 0)
    ),
    "translate_y": Operation(
        lambda draw: draw.signed(int(draw.level() * draw.height / 30)), matrix=lambda s, h, w: (1, 0, 0, 0, 1, s)
    ),
}
_ENHANCEMENTS: dict[str, Kernel] = {
    "color": kernels.color,
    "contrast": kernels.contrast,
    "brightness": kernels.brightness,
    "sharpness": kernels.sharpness,
}
OPERATIONS: dict[str, Operation] = {
    **_SAFE,
    **{
        name: Operation(Draw.brightness if name == "brightness" else Draw.factor, kernel)
        for name, kernel in _ENHANCEMENTS.items()
    },
    **{f"{name}_original": Operation(Draw.original_factor, kernel) for name, kernel in _ENHANCEMENTS.items()},
}
#: The operations of each augmentation set. The set "safe" omits operations that overlap with the corruptions of ImageNet-C,
#: and "tone" those of "original" that move pixels.
AUGMENTATION_SETS: dict[str, tuple[str, ...]] = {
    "all": (*_SAFE, *_ENHANCEMENTS),
    "safe": tuple(_SAFE),
    "original": (*_SAFE, *(f"{name}_original" for name in _ENHANCEMENTS)),
}
AUGMENTATION_SETS["tone"] = tuple(name for name in AUGMENTATION_SETS["original"] if OPERATIONS[name].matrix is None)


class Layer(NamedTuple):
    """One operation for each image of a batch: its name, or None, and its strength."""

    names: list[str | None]
    strengths: list[float]


def draw_layers(
    depth: int,
    images: Tensor,
    augmentation_set: str,
    severity: float,
    *,
    identity: bool = False,
    constant: bool = False,
    generator: torch.Generator | None = None,
) -> list[Layer]:
    """Draw ``depth`` operations for each image of ``(n, C, H, W)``, uniformly from an augmentation set, and their strengths.

    With ``L ~ U(0.1, severity)``: posterize to ``4 - int(0.4 L)`` bits, rotate by ``±int(3 L)`` degrees, solarize above
    ``256 - int(25.6 L)``, shear by ``±0.03 L``, translate by ``±int(L · side / 30)`` pixels, ``*_original`` enhancements
    by ``0.18 L + 0.1``. Colour, contrast, brightness and sharpness: a factor of ``U(1, severity)`` or
    ``U(1 - 0.09 severity, 1)``, each half of the time; a brightness above 1 is multiplied by 0.75. Equalize and
    autocontrast have no strength.

    Args:
        identity: whether leaving the image as it is is one more operation of the set.
        constant: ``L = severity``, and each factor at an end of its range.
    """
    names = AUGMENTATION_SETS[augmentation_set]
    count, _, height, width = images.shape
    shape, device = (depth, count), "cpu" if generator is None else generator.device
    chosen = torch.randint(-1 if identity else 0, len(names), shape, generator=generator, device=device).tolist()
    ups = torch.randint(2, shape, generator=generator, device=device).tolist()
    if constant:
        us = [[1.0] * count] * depth
    else:
        us = torch.rand(shape, generator=generator, device=device, dtype=torch.float64).tolist()
    layers = []
    for which, places, signs in zip(chosen, us, ups, strict=True):
        layer = Layer([None if index < 0 else names[index] for index in which], [])
        for name, u, up in zip(layer.names, places, signs, strict=True):
            draw = Draw(u, bool(up), severity, height, width)
            layer.strengths.append(0.0 if name is None else OPERATIONS[name].strength(draw))
        layers.append(layer)
    return layers


def operate(images: Tensor, layer: Layer) -> None:
    """Apply to each image its operation of ``layer``, in place.

    Each operation runs once on all of its images, and all of geometry in one interpolation; on the CPU, on a few images at a
    time, which stay in its cache.

    Args:
        images: ``(n, C, H, W)`` of 1 or 3 channels, uint8, or float32 or float64 in [0, 1].
        layer: names of :data:`OPERATIONS`, and strengths: bits, degrees, a threshold of 256, a slope, pixels, or a factor.
    """
    groups: dict[Kernel, tuple[list[Tensor], list[Any]]] = {}
    for image, name, strength in zip(images.unbind(), *layer, strict=True):
        if name is None:
            continue
        operation = OPERATIONS[name]
        kernel: Kernel | None
        amount: Any
        if operation.matrix is None:
            kernel, amount = operation.kernel, [[[strength]]]
        else:
            matrix = operation.matrix(strength, *images.shape[-2:])
            whole = matrix[:2] == (1, 0) and matrix[3:5] == (0, 1) and matrix[2] % 1 == matrix[5] % 1 == 0
            kernel, amount = kernels.shift if whole and images.is_cpu else kernels.warp, matrix
        assert kernel is not None
        some, amounts = groups.setdefault(kernel, ([], []))
        some.append(image)
        amounts.append(amount)
    dtype = images.dtype if images.is_floating_point() else torch.float32
    few = part_of(images)
    for kernel, (some, amounts) in groups.items():
        strengths = torch.tensor(amounts, dtype=dtype).to(images.device, non_blocking=True)
        for start in range(0, len(some), few):
            part = some[start : start + few]
            torch._foreach_copy_(part, list(kernel(torch.stack(part), strengths[start : start + few]).unbind()))


def part_of(images: Tensor) -> int:
    """Return how many of ``images`` to compute on at once: on the CPU as many as fit its cache, elsewhere all."""
    return max(1, _CACHED_PIXELS // images[0].numel()) if images.is_cpu else len(images)


_CACHED_PIXELS = 1_200_000
