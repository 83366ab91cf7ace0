"""Corrupted images of five severities, as in ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019, arXiv:1903.12261)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket.help.names import closest
from hocket_tools.arguments import check_least, checked
from hocket_tools.judging.corruption_kinds import blur, digital, noise, weather

if TYPE_CHECKING:
    from torch import Tensor

#: Each kind, and its parameters by severity: for images of at most 64 pixels, as in CIFAR-10-C, and for larger ones, as in
#: ImageNet-C.
_KINDS: dict[str, tuple[Callable[[Any, Any, Any], Any], Sequence[Any], Sequence[Any]]] = {
    "gaussian-noise": (noise.gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot-noise": (noise.shot_noise, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
    "impulse-noise": (noise.impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "speckle-noise": (noise.speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6)),
    "gaussian-blur": (blur.gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6)),
    "defocus-blur": (blur.defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    # the blur, the reach of the swaps, and their number
    "glass-blur": (blur.glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion-blur": (blur.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    # the largest zoom, and the step
    "zoom-blur": (blur.zoom_blur, ((1.05, 0.01), (1.1, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01)),
        ((1.1, 0.01), (1.15, 0.01), (1.2, 0.02), (1.25, 0.02), (1.3, 0.03))),
    # the flakes' mean, deviation, zoom, threshold, radius and sigma, and how much of the image is kept
    "snow": (weather.snow,
        ((0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
         (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)),
        ((0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
         (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65), (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55))),
    "frost": (weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (weather.brightness, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (weather.contrast, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    # the liquid's mean, deviation, smoothness and threshold; the amount of water, or the smoothness of mud
    "spatter": (weather.spatter,
        ((0.62, 0.1, 0.7, 0.7, 0.5, False), (0.65, 0.1, 0.8, 0.7, 0.5, False), (0.65, 0.3, 1, 0.69, 0.5, False),
         (0.65, 0.1, 0.7, 0.69, 0.6, True), (0.65, 0.1, 0.5, 0.68, 0.6, True)),
        ((0.65, 0.3, 4, 0.69, 0.6, False), (0.65, 0.3, 3, 0.68, 0.6, False), (0.65, 0.3, 2, 0.68, 0.5, False),
         (0.65, 0.3, 1, 0.65, 1.5, True), (0.67, 0.4, 1, 0.65, 1.5, True))),
    "saturate": (weather.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))),
    # fractions of the side: displacement, its smoothness, and the shift of the corners
    "elastic-transform": (digital.elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))),
    "pixelate": (digital.pixelate, (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg-compression": (digital.jpeg_compression, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
}  # fmt: skip
CORRUPTIONS = tuple(_KINDS)
SEVERITIES = (1, 2, 3, 4, 5)
#: The longest side of images that have the parameters of CIFAR-10-C.
_SMALL = 64


@checked
def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0, places: Sequence[int] | None = None) -> Tensor:
    """Return corrupted copies of images, as robustness is measured on (arXiv:1903.12261).

    The random numbers of an image follow from the seed, kind, severity and its place, so they do not depend on the batch, the
    number of ranks or the device. Images of up to 64 pixels have the parameters of CIFAR-10-C, larger ones those of
    ImageNet-C. They differ from those data sets' images in these points, so that errors compare models with each other rather
    than with published tables: motion blur is a line of Gaussian weights rather than ImageMagick's; pixels beyond the border
    are reflections; glass blur swaps pixels, of which the original code copies one; the water of spatter is shaded by its
    slope rather than by OpenCV's edges; and frost is a generated fractal, as its photographs are not part of this package.

    Args:
        images: ``(N, C, H, W)`` floats in [0, 1].
        kind: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: of the random numbers.
        places: a number for each image; 0, 1, … unless given.

    Returns:
        ``(N, C, H, W)`` in [0, 1], of the dtype and on the device of ``images``.

    Raises ValueError for another kind, severity, shape or range.

    Example:
        >>> import torch
        >>> from hocket_tools import corrupt
        >>> image = torch.rand(1, 3, 32, 32)
        >>> noisy = corrupt(image.expand(2, -1, -1, -1), "gaussian-noise", 3)
        >>> round((noisy - image).std().item(), 1), torch.equal(noisy[0], noisy[1])
        (0.1, False)
        >>> torch.equal(corrupt(image, "gaussian-noise", 3, places=[1]), noisy[1:])
        True
    """
    import numpy as np
    import torch

    if kind not in _KINDS:
        near = closest(kind, CORRUPTIONS)
        meant = f" Did you mean {near!r}?" if near else ""
        raise WrongValue(f"There is no corruption {kind!r}.{meant} The kinds are {', '.join(CORRUPTIONS)}.")
    if severity not in SEVERITIES:
        raise WrongValue(f"«severity={severity!r}» is not a severity. Write 1 to 5.")
    check_least(0, 0, seed=seed)
    if images.dim() != 4 or not images.is_floating_point():
        raise WrongValue(
            f"corrupt was given {images.dtype} of shape {tuple(images.shape)}. Images are floats (N, C, H, W) in [0, 1]: write "
            "images / 255 for bytes, and images[None] for one image."
        )
    places = range(len(images)) if places is None else places
    if len(places) != len(images):
        raise WrongValue(
            f"corrupt was given {len(places)} places for {len(images)} images. Give one for each image, or omit «places=»."
        )
    pixels = images.detach().double().cpu().numpy()
    if pixels.size and not (pixels.min() >= -1e-6 and pixels.max() <= 1 + 1e-6):
        raise WrongValue(
            f"corrupt was given images from {pixels.min():.4g} to {pixels.max():.4g}, and corruptions are of pixels in [0, 1]. "
            "Undo their normalization first: images * std + mean."
        )
    function, small, large = _KINDS[kind]
    parameters = (large if max(images.shape[2:]) > _SMALL else small)[severity - 1]
    changed = np.empty_like(pixels)
    for number, (image, place) in enumerate(zip(pixels, places, strict=True)):
        generator = np.random.default_rng([seed, zlib.crc32(kind.encode()), severity, place])
        changed[number] = np.clip(function(image, parameters, generator), 0, 1)
    return torch.from_numpy(changed).to(images.device, images.dtype)
