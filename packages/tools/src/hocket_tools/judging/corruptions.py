"""Corrupted images of five severities, as in ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019, arXiv:1903.12261)."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Image = NDArray[np.float64]
    Generator = np.random.Generator

#: The parameters of each kind by severity: for images of at most 64 pixels, as in CIFAR-10-C, and for larger ones, as in
#: ImageNet-C.
_PARAMETERS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "gaussian-noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot-noise": ((500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
    "impulse-noise": ((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "speckle-noise": ((0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6)),
    "gaussian-blur": ((0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6)),
    "defocus-blur": (
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "motion-blur": (((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)), ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    # the largest zoom, and the step
    "zoom-blur": (
        ((1.05, 0.01), (1.1, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01)),
        ((1.1, 0.01), (1.15, 0.01), (1.2, 0.02), (1.25, 0.02), (1.3, 0.03)),
    ),
    "fog": (
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "saturate": (
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    ),
    # fractions of the side: displacement, its smoothness, and the shift of the corners
    "elastic-transform": (
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg-compression": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
}
CORRUPTIONS = tuple(_PARAMETERS)
SEVERITIES = (1, 2, 3, 4, 5)
#: The longest side of images that have the parameters of CIFAR-10-C.
_SMALL = 64


def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0, places: Sequence[int] | None = None) -> Tensor:
    """Return corrupted copies of images, as robustness is measured on (arXiv:1903.12261).

    The random numbers of an image follow from the seed, kind, severity and its place, so they do not depend on the batch, the
    number of ranks or the device. Images of up to 64 pixels have the parameters of CIFAR-10-C, larger ones those of
    ImageNet-C. Motion blur is a line of Gaussian weights rather than ImageMagick's, and pixels beyond the border are
    reflections; the kinds that need photographs or drawings (frost, snow, spatter) and glass blur are omitted.

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

    if kind not in _PARAMETERS:
        from hocket.help import names

        near = names.closest(kind, CORRUPTIONS)
        meant = f" Did you mean {near!r}?" if near else ""
        raise WrongValue(f"There is no corruption {kind!r}.{meant} The kinds are {', '.join(CORRUPTIONS)}.")
    if severity not in SEVERITIES:
        raise WrongValue(f"«severity={severity!r}» is not a severity. Write 1 to 5.")
    if images.dim() != 4 or not images.is_floating_point():
        raise WrongValue(
            f"corrupt was given {images.dtype} of shape {tuple(images.shape)}. Images are floats (N, C, H, W) in [0, 1]."
        )
    pixels = images.detach().double().cpu().numpy()
    if pixels.size and not (pixels.min() >= -1e-6 and pixels.max() <= 1 + 1e-6):
        raise WrongValue(
            f"corrupt was given images from {pixels.min():.4g} to {pixels.max():.4g}, and corruptions are of pixels in [0, 1]. "
            "Undo their normalization first: images * std + mean."
        )
    parameters = _PARAMETERS[kind][max(images.shape[2:]) > _SMALL][severity - 1]
    changed = np.empty_like(pixels)
    places = range(len(pixels)) if places is None else places
    for number, (image, place) in enumerate(zip(pixels, places, strict=True)):
        generator = np.random.default_rng([seed, zlib.crc32(kind.encode()), severity, place])
        changed[number] = np.clip(_KINDS[kind](image, parameters, generator), 0, 1)
    return torch.from_numpy(changed).to(images.device, images.dtype)


# --- noise: images are (C, H, W)


def _gaussian_noise(image: Image, scale: float, generator: Generator) -> Image:
    return image + generator.normal(scale=scale, size=image.shape)


def _shot_noise(image: Image, photons: float, generator: Generator) -> Image:
    return generator.poisson(image.clip(0, 1) * photons) / photons


def _impulse_noise(image: Image, amount: float, generator: Generator) -> Image:
    """Replace a fraction of the values by 0 or 1 (salt and pepper)."""
    import numpy as np

    draws = generator.random((2, *image.shape))
    return np.where(draws[0] < amount, (draws[1] < 0.5).astype(float), image)


def _speckle_noise(image: Image, scale: float, generator: Generator) -> Image:
    return image + image * generator.normal(scale=scale, size=image.shape)


# --- blur


def _gaussian_blur(image: Image, sigma: float, generator: Generator) -> Image:
    return _smoothed(image, sigma)


def _defocus_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Filter with a disk whose edge is smoothed."""
    import numpy as np

    radius, edge = parameters
    reach = max(math.ceil(radius), 1) + 1
    offsets = np.arange(-reach, reach + 1)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(float)
    return _filtered(image, _smoothed((disk / disk.sum())[None], edge, "constant", width=1 if radius <= 8 else 2)[0])


def _motion_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Average along a line behind each pixel, at an angle within 45 degrees of the horizontal, with Gaussian weights."""
    import numpy as np

    radius, sigma = parameters
    angle = math.radians(generator.uniform(-45, 45))
    steps = np.arange(2 * int(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    rows, columns = np.mgrid[: image.shape[1], : image.shape[2]].astype(float)
    moved = (_sampled(image, rows + step * math.sin(angle), columns + step * math.cos(angle)) for step in steps)
    return sum(weight * each for weight, each in zip(weights / weights.sum(), moved, strict=True))  # type: ignore[no-any-return]


def _zoom_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Average an image with enlargements about its centre."""
    import numpy as np

    largest, step = parameters
    factors = np.arange(1, largest + step / 2, step)
    centre = [(side - 1) / 2 for side in image.shape[1:]]
    rows, columns = np.mgrid[: image.shape[1], : image.shape[2]].astype(float)
    zoomed = [
        _sampled(image, centre[0] + (rows - centre[0]) / each, centre[1] + (columns - centre[1]) / each)
        for each in factors
    ]
    return (image + sum(zoomed)) / (len(factors) + 1)


# --- weather and light


def _fog(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Add a fractal haze, and scale to the brightest value."""
    amount, decay = parameters
    brightest = image.max()
    height, width = image.shape[1:]
    haze = _plasma(1 << max(height, width, 2).bit_length(), decay, generator)[:height, :width]
    return (image + amount * haze) * brightest / (brightest + amount)  # type: ignore[no-any-return]


def _plasma(size: int, decay: float, generator: Generator) -> Image:
    """Return a square of heights in [0, 1] by the diamond-square algorithm (Fournier et al. 1982), on a torus."""
    import numpy as np

    heights, step, wobble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        rows = corners + np.roll(corners, -1, 0)
        noise = generator.uniform(-wobble, wobble, (3, *corners.shape))
        centres = (rows + np.roll(rows, -1, 1)) / 4 + wobble * noise[0]
        heights[half::step, half::step] = centres
        across = corners + np.roll(corners, -1, 1) + centres + np.roll(centres, 1, 0)
        down = rows + centres + np.roll(centres, 1, 1)
        heights[::step, half::step] = across / 4 + wobble * noise[1]
        heights[half::step, ::step] = down / 4 + wobble * noise[2]
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return heights / heights.max()  # type: ignore[no-any-return]


def _brightness(image: Image, amount: float, generator: Generator) -> Image:
    """Add to the value of HSV, the largest channel, and keep hue and saturation."""
    import numpy as np

    value = image.max(0)
    new = np.clip(value + amount, 0, 1)
    return np.where(value > 0, image * (new / np.where(value > 0, value, 1)), new)  # type: ignore[no-any-return]


def _contrast(image: Image, factor: float, generator: Generator) -> Image:
    mean = image.mean((1, 2), keepdims=True)
    return (image - mean) * factor + mean  # type: ignore[no-any-return]


def _saturate(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Scale and shift the saturation of HSV. Grey images, and grey pixels of saturation 0, have a hue of red."""
    import numpy as np

    if len(image) != 3:
        return image
    factor, shift = parameters
    value = image.max(0)
    chroma = value - image.min(0)
    saturation = np.divide(chroma, value, out=np.zeros_like(value), where=value > 0)
    new = np.clip(saturation * factor + shift, 0, 1) * value
    away = value - image  # 0 for the largest channel, the chroma for the smallest
    red = np.array([0.0, 1.0, 1.0])[:, None, None]
    share = np.divide(away, chroma, out=np.broadcast_to(red, image.shape).copy(), where=chroma > 0)
    return value - share * new  # type: ignore[no-any-return]


# --- digital


def _elastic_transform(image: Image, parameters: tuple[float, float, float], generator: Generator) -> Image:
    """Move three corners of a triangle at random, and then each pixel by a smooth random displacement."""
    import numpy as np

    height, width = image.shape[1:]
    side = min(height, width)
    amount, smoothness, shift = (each * side for each in parameters)
    centre, reach = np.array([height // 2, width // 2]), side // 3
    before = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + generator.uniform(-shift, shift, (3, 2))
    ones = np.ones((3, 1))
    back = np.linalg.solve(np.hstack([after, ones]), before.astype(float))  # from a pixel of the result to its origin
    rows, columns = np.mgrid[:height, :width].astype(float)
    draws = generator.uniform(-1, 1, (2, height, width))
    moved = amount * _smoothed(draws, smoothness) if amount else np.zeros_like(draws)
    places = np.stack([rows + moved[0], columns + moved[1], np.ones_like(rows)], -1) @ back
    return _sampled(image, places[..., 0], places[..., 1])


def _pixelate(image: Image, factor: float, generator: Generator) -> Image:
    """Shrink and enlarge by boxes."""
    import numpy as np

    for axis in (1, 2):
        length = image.shape[axis]
        less = max(int(length * factor), 1)
        image = np.moveaxis(np.moveaxis(image, axis, -1) @ _boxes(length, less) @ _boxes(less, length), -1, axis)
    return image


def _boxes(length: int, new: int) -> Image:
    """Return weights ``(length, new)`` of the box filter: the overlap of each new pixel with the old ones."""
    import numpy as np

    support = max(length / new, 1.0) / 2
    centres = (np.arange(new) + 0.5) * length / new
    offsets = np.arange(length)[:, None] + 0.5 - centres
    weights = ((offsets > -support - 1e-9) & (offsets <= support + 1e-9) & ~np.isclose(offsets, -support)).astype(float)
    return weights / weights.sum(0)  # type: ignore[no-any-return]


def _jpeg_compression(image: Image, quality: int, generator: Generator) -> Image:
    import numpy as np

    from hocket.help import optional_packages

    pillow = optional_packages.module("PIL.Image", "jpeg-compression")
    if len(image) not in (1, 3):
        raise WrongValue(
            f"jpeg-compression takes images of 1 or 3 channels, not {len(image)}. Name other --corruptions."
        )
    levels = np.round(np.moveaxis(image, 0, -1) * 255).astype(np.uint8)
    file = io.BytesIO()
    pillow.fromarray(levels.squeeze(-1) if len(image) == 1 else levels).save(file, "JPEG", quality=quality)
    decoded = np.asarray(pillow.open(file), dtype=np.float64) / 255
    return decoded[None] if len(image) == 1 else np.moveaxis(decoded, -1, 0)


# --- filters


def _smoothed(image: Image, sigma: float, mode: str = "symmetric", width: int | None = None) -> Image:
    """Filter with a Gaussian, along the last two axes; ``width`` is its reach in pixels, 4 sigma unless given."""
    import numpy as np

    reach = max(int(4 * sigma + 0.5), 1) if width is None else width
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-(offsets**2) / (2 * max(sigma, 1e-6) ** 2))
    weights /= weights.sum()
    for axis in (-2, -1):
        padded = np.pad(
            image,
            [(0, 0)] * (image.ndim + axis) + [(reach, reach)] + [(0, 0)] * (-1 - axis),
            mode=mode,  # type: ignore[call-overload]
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(weights), axis=axis)
        image = windows @ weights
    return image


def _filtered(image: Image, kernel: Image) -> Image:
    """Filter with a symmetric kernel of odd size; the image is reflected at its borders."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    reach = len(kernel) // 2
    padded = np.pad(image, [(0, 0), (reach, reach), (reach, reach)], mode="symmetric")
    weights = torch.from_numpy(kernel)[None, None]
    return F.conv2d(torch.from_numpy(padded)[:, None], weights)[:, 0].numpy()


def _sampled(image: Image, rows: Image, columns: Image) -> Image:
    """Interpolate an image linearly at places, which are reflected at its borders."""
    import numpy as np

    def reflected(places: Image, length: int) -> Image:
        if length == 1:
            return np.zeros_like(places)
        period = 2 * (length - 1)
        places = np.abs(places) % period
        return np.minimum(places, period - places)

    height, width = image.shape[1:]
    rows, columns = reflected(rows, height), reflected(columns, width)
    top, left = (np.minimum(each.astype(int), side - 1) for each, side in ((rows, height), (columns, width)))
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, across = rows - top, columns - left
    upper = image[:, top, left] * (1 - across) + image[:, top, right] * across
    lower = image[:, bottom, left] * (1 - across) + image[:, bottom, right] * across
    return upper * (1 - down) + lower * down  # type: ignore[no-any-return]


_KINDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gaussian-noise": _gaussian_noise, "shot-noise": _shot_noise, "impulse-noise": _impulse_noise,
    "speckle-noise": _speckle_noise, "gaussian-blur": _gaussian_blur, "defocus-blur": _defocus_blur,
    "motion-blur": _motion_blur, "zoom-blur": _zoom_blur, "fog": _fog, "brightness": _brightness, "contrast": _contrast,
    "saturate": _saturate, "elastic-transform": _elastic_transform, "pixelate": _pixelate,
    "jpeg-compression": _jpeg_compression,
}  # fmt: skip
