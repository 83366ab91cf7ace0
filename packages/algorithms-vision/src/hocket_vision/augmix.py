"""AugMix: mix an image with several randomly augmented versions of itself.

Source: Hendrycks et al. 2020, "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty",
arXiv 1912.02781, algorithm 1 (without the Jensen-Shannon loss of its section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from hocket.algorithm import Algorithm, Phase
from hocket.hookspecs import Event
from hocket_vision.per_sample import PER_SAMPLE_EVENTS, apply_per_sample

if TYPE_CHECKING:
    from PIL.Image import Image

    from hocket.state import State

ImageT = TypeVar("ImageT", Tensor, "Image")
AugmentationSet = Literal["all", "safe", "original"]

#: An augmentation whose strength has been drawn: image in, image of the same kind and size out.
Augmentation = Callable[[Any], Any]


class _Draw(NamedTuple):
    """The source of an operation's random strength."""

    severity: float
    height: int
    width: int
    generator: torch.Generator | None

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=self.generator, device=self.device).item()

    def integer(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator, device=self.device))

    def dirichlet(self, alpha: float, count: int) -> list[float]:
        # torch.distributions takes no generator; this is the sampler that it calls.
        alphas = torch.full((count,), alpha, dtype=torch.float64, device=self.device)
        shares: Tensor = torch._sample_dirichlet(alphas, generator=self.generator)
        return shares.tolist()

    def level(self) -> float:
        return self.uniform(0.1, self.severity)

    def signed(self, amount: float) -> float:
        return amount if self.integer(2) else -amount

    def factor(self) -> float:
        """Return the strength of an enhancement around 1: above or below with equal probability."""
        high, low = self.severity, 1 - 0.09 * self.severity
        return self.uniform(1.0, high) if self.integer(2) else self.uniform(low, 1.0)

    def original_factor(self) -> float:
        return self.level() * 0.18 + 0.1

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.generator is None else self.generator.device


def _affine(image: Any, translate: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)) -> Any:
    # Shears by atan(slope) around the corner, as PIL and the paper's code do.
    degrees = [math.degrees(math.atan(slope)) for slope in shear]
    centre = [0.0, 0.0]
    return F.affine(image, 0.0, list(translate), 1.0, degrees, InterpolationMode.BILINEAR, center=centre)


def _solarize(image: Any, threshold: int) -> Any:
    if threshold > 255:  # nothing is that bright
        return image
    floating = isinstance(image, Tensor) and image.is_floating_point()
    return F.solarize(image, threshold / 255 if floating else threshold)


def _translation(d: _Draw, size: int) -> int:
    return int(d.signed(int(d.level() * size / 30)))


def _brightness(d: _Draw) -> float:
    factor = d.factor()
    return 0.75 * factor if factor > 1 else factor


# Name -> (operation, what to draw its strength with). Strengths are those of the paper's code: level/10 of posterize 4
# bits, rotate 30°, solarize 256, shear 0.3, translate a third of the side.
_GEOMETRY_AND_TONE: dict[str, tuple[Callable[..., Any], Callable[[_Draw], Any] | None]] = {
    "autocontrast": (F.autocontrast, None),
    "equalize": (F.equalize, None),
    "posterize": (F.posterize, lambda d: 4 - int(d.level() * 0.4)),
    "rotate": (
        lambda image, angle: F.rotate(image, angle, InterpolationMode.BILINEAR),
        lambda d: d.signed(int(d.level() * 3)),
    ),
    "solarize": (_solarize, lambda d: 256 - int(d.level() * 25.6)),
    "shear_x": (lambda image, slope: _affine(image, shear=(slope, 0.0)), lambda d: d.signed(d.level() * 0.03)),
    "shear_y": (lambda image, slope: _affine(image, shear=(0.0, slope)), lambda d: d.signed(d.level() * 0.03)),
    "translate_x": (lambda image, by: _affine(image, translate=(by, 0)), lambda d: _translation(d, d.width)),
    "translate_y": (lambda image, by: _affine(image, translate=(0, by)), lambda d: _translation(d, d.height)),
}
_ENHANCEMENTS: dict[str, Callable[..., Any]] = {
    "color": F.adjust_saturation,
    "contrast": F.adjust_contrast,
    "brightness": F.adjust_brightness,
    "sharpness": F.adjust_sharpness,
}
OPERATIONS = {
    **_GEOMETRY_AND_TONE,
    **{name: (op, _brightness if name == "brightness" else _Draw.factor) for name, op in _ENHANCEMENTS.items()},
    **{f"{name}_original": (op, _Draw.original_factor) for name, op in _ENHANCEMENTS.items()},
}
#: The operations of each augmentation set. The set "safe" omits operations that overlap with the corruptions of ImageNet-C.
AUGMENTATION_SETS: dict[str, tuple[str, ...]] = {
    "all": (*_GEOMETRY_AND_TONE, *_ENHANCEMENTS),
    "safe": tuple(_GEOMETRY_AND_TONE),
    "original": (*_GEOMETRY_AND_TONE, *(f"{name}_original" for name in _ENHANCEMENTS)),
}


def draw_augmentation(
    name: str, severity: float, height: int, width: int, *, generator: torch.Generator | None = None
) -> Augmentation:
    """Return the operation ``name`` of :data:`AUGMENTATION_SETS` with a strength drawn for ``severity``.

    With ``L ~ U(0.1, severity)``: posterize to ``4 - int(0.4 L)`` bits, rotate by ``±int(3 L)`` degrees, solarize above
    ``256 - int(25.6 L)``, shear by ``±0.03 L``, translate by ``±int(L · side / 30)`` pixels, ``*_original``
    enhancements by ``0.18 L + 0.1``. Colour, contrast, brightness and sharpness: a factor of ``U(1, severity)`` or
    ``U(1 - 0.09 severity, 1)``, each half of the time; a brightness above 1 is multiplied by 0.75. Equalize and
    autocontrast have no strength.
    """
    if name not in OPERATIONS:
        raise ValueError(f"There is no operation {name!r}; there are {', '.join(OPERATIONS)}.")
    operation, draw = OPERATIONS[name]
    if draw is None:
        return operation
    strength = draw(_Draw(severity, height, width, generator))
    return lambda image: operation(image, strength)


def mix_chains(image: ImageT, chains: Sequence[Sequence[Augmentation]], weights: Sequence[float], m: float) -> ImageT:
    """Return ``(1 - m) · image + m · Σ weights[k] · chains[k](image)`` (arXiv 1912.02781, algorithm 1, lines 5 to 15).

    Args:
        image: PIL image, or tensor ``(C, H, W)``, uint8 or floating point. Integers are rounded to the nearest.
        chains: augmentations, applied from first to last; an empty chain is the image itself.
        weights: one per chain; they should sum to 1.
        m: fraction of the mixture in the result, 0 to 1.
    """
    if len(weights) != len(chains):
        raise ValueError(f"Every chain needs a weight: there are {len(chains)} chains and {len(weights)} weights.")
    mixture = (1 - m) * _numbers(image)
    for chain, weight in zip(chains, weights, strict=True):
        augmented: Any = image
        for augmentation in chain:
            augmented = augmentation(augmented)
        mixture = mixture + m * weight * _numbers(augmented)
    if isinstance(image, Tensor):
        mixed = _as_dtype(mixture, image.dtype)
        return tv_tensors.wrap(mixed, like=image) if isinstance(image, tv_tensors.TVTensor) else mixed
    return F.to_pil_image(_as_dtype(mixture, torch.uint8), mode=image.mode)


def augmix(
    image: ImageT,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: torch.Generator | None = None,
) -> ImageT:
    """Mix one image with ``width`` randomly augmented versions of itself.

    Weights of the versions are ``Dirichlet(alpha, …, alpha)``, the fraction of their mixture is ``Beta(alpha, alpha)``
    (arXiv 1912.02781, section 3).

    Args:
        image: one image before normalization: PIL (L or RGB), or tensor ``(C, H, W)`` of 1 or 3 channels,
            uint8, or floating point in [0, 1].
        severity: strength of the augmentations, 0 to 10.
        depth: augmentations in a row per version; -1 draws 1, 2 or 3 for each version.
        width: number of augmented versions.
        alpha: above 0; large values mix evenly, small ones pick one version.
        augmentation_set: ``"safe"`` (9 operations on geometry and tone), ``"all"`` (and colour, contrast, brightness
            and sharpness in both directions) or ``"original"`` (those four as in the paper's code, mostly downwards).
        generator: source of randomness; torch's default generator if None.

    Returns:
        A new image of the same kind, size and dtype.

    Raises:
        ValueError: for arguments out of range, a batch instead of an image, or floating-point pixels outside [0, 1].
        TypeError: for something that is neither a PIL image nor such a tensor.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import augmix
        >>> image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
        >>> augmix(image, severity=3).shape
        torch.Size([3, 32, 32])
    """
    check_settings(severity, depth, width, alpha, augmentation_set)
    rows, columns = _check_image(image)
    draw = _Draw(severity, rows, columns, generator)
    names = AUGMENTATION_SETS[augmentation_set]
    weights = draw.dirichlet(alpha, width)
    m = draw.dirichlet(alpha, 2)[0]  # Beta(a, a) is the first component of Dirichlet(a, a)
    chains = []
    for _ in range(width):
        length = 1 + draw.integer(3) if depth == -1 else depth
        chains.append(
            [
                draw_augmentation(names[draw.integer(len(names))], severity, rows, columns, generator=generator)
                for _ in range(length)
            ]
        )
    return mix_chains(image, chains, weights, m)


class AugMix(Algorithm):
    """Mix each training image with augmented versions of itself (Hendrycks et al. 2020, arXiv 1912.02781).

    Acts on samples where they are loaded: before the image becomes a tensor in a ``torchvision`` dataset, on ``input_key``
    of a sample of any other map-style dataset; see :func:`hocket_vision.per_sample.apply_per_sample`.

    Args:
        severity, depth, width, alpha, augmentation_set: see :func:`augmix`.
        input_key: where the image is in a sample.

    Raises:
        ValueError: for arguments out of range.
        TypeError: later, for training data that is not a DataLoader over a map-style dataset.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8))
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8)), loss=torch.nn.CrossEntropyLoss(),
        ...     train_data=torch.utils.data.DataLoader(dataset, batch_size=4), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     algorithms=[hocket_vision.AugMix(severity=3)], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    events = PER_SAMPLE_EVENTS
    phase = Phase.DATA

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: AugmentationSet = "all",
        input_key: Any = 0,
    ) -> None:
        check_settings(severity, depth, width, alpha, augmentation_set)
        self.severity = severity
        self.depth = depth
        self.width = width
        self.alpha = alpha
        self.augmentation_set = augmentation_set
        self.input_key = input_key

    def apply(self, event: Event, state: State) -> None:
        """Augment the samples of this fit."""
        transform = partial(
            augmix,
            severity=self.severity,
            depth=self.depth,
            width=self.width,
            alpha=self.alpha,
            augmentation_set=self.augmentation_set,
        )
        apply_per_sample(self, event, state, transform, self.input_key)


def check_settings(severity: float, depth: int, width: int, alpha: float, augmentation_set: str) -> None:
    """Raise ValueError for arguments of AugMix that are out of range."""
    if not 0 <= severity <= 10:
        raise ValueError(f"severity must be between 0 and 10, but is {severity}. The paper uses 3.")
    if depth != -1 and depth < 1:
        raise ValueError(f"depth must be at least 1, or -1 to draw 1, 2 or 3 for each version, but is {depth}.")
    if width < 1:
        raise ValueError(f"width is the number of augmented versions and must be at least 1, but is {width}.")
    if not alpha > 0 or math.isinf(alpha):
        raise ValueError(f"alpha must be a positive number, but is {alpha}. The paper uses 1.")
    if augmentation_set not in AUGMENTATION_SETS:
        raise ValueError(
            f"augmentation_set must be one of {', '.join(AUGMENTATION_SETS)}, but is {augmentation_set!r}."
        )


def _check_image(image: Any) -> tuple[int, int]:
    """Return height and width of an image, or raise if AugMix does not support it."""
    if not isinstance(image, Tensor):
        mode = getattr(image, "mode", None)
        if mode is None:
            raise TypeError(f"AugMix takes a PIL image or a (C, H, W) tensor, but was given {type(image).__name__}.")
        if mode not in ("L", "RGB"):
            raise ValueError(
                f"AugMix takes PIL images of mode L or RGB, but was given {mode}. Try image.convert('RGB')."
            )
        return image.height, image.width
    if image.dim() != 3:
        raise ValueError(
            f"AugMix takes one image as a (C, H, W) tensor, but was given shape {tuple(image.shape)}. It draws "
            "separately for every sample: apply it in the dataset, or to each image of a batch. Remove augmix if the "
            "inputs are not images."
        )
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise TypeError(f"AugMix takes tensors of uint8 or floating point, but was given {image.dtype}.")
    if image.is_floating_point() and not (image.min() >= 0 and image.max() <= 1):
        raise ValueError(
            f"AugMix takes floating-point images in [0, 1], but was given {image.min():.3g} to {image.max():.3g}. "
            "Apply it before normalization."
        )
    channels, height, width = image.shape
    if channels not in (1, 3):
        raise ValueError(
            f"AugMix takes images of 1 or 3 channels, but was given shape {tuple(image.shape)}. Channels come first: "
            "(C, H, W), not (H, W, C)."
        )
    return height, width


def _numbers(image: Any) -> Tensor:
    pixels = image if isinstance(image, Tensor) else F.pil_to_tensor(image)
    return pixels.to(torch.promote_types(pixels.dtype, torch.float32))


def _as_dtype(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    return pixels.clamp(0, 1).to(dtype) if dtype.is_floating_point else pixels.round().clamp(0, 255).to(dtype)
