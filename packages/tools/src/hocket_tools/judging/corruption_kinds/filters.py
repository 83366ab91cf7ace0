"""Filters and interpolation, which reflect images at their borders."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: Channels, height and width.
Image = NDArray[np.float64]
Generator = np.random.Generator


def smoothed(image: Image, sigma: float, mode: str = "symmetric", width: int | None = None) -> Image:
    """Filter with a Gaussian, along the last two axes; ``width`` is its reach in pixels, 4 sigma unless given."""
    reach = max(int(4 * sigma + 0.5), 1) if width is None else width
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-(offsets**2) / (2 * max(sigma, 1e-6) ** 2))
    weights /= weights.sum()
    for axis in (-2, -1):
        widths = np.zeros((image.ndim, 2), int)
        widths[axis] = reach
        padded = np.pad(image, widths, mode=mode)  # type: ignore[call-overload]
        image = np.lib.stride_tricks.sliding_window_view(padded, len(weights), axis=axis) @ weights
    return image


def filtered(image: Image, kernel: Image) -> Image:
    """Correlate with a kernel of odd size."""
    reach = len(kernel) // 2
    padded = np.pad(image, [(0, 0), (reach, reach), (reach, reach)], mode="symmetric")
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape, axis=(1, 2))
    return np.einsum("chwij,ij->chw", windows, kernel)  # type: ignore[no-any-return]


def smeared(image: Image, radius: float, sigma: float, angle: float) -> Image:
    """Average along a line behind each pixel, at an angle in degrees from the horizontal, with Gaussian weights."""
    steps = np.arange(2 * int(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down, right = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    rows, columns = np.mgrid[: image.shape[1], : image.shape[2]].astype(float)
    moved = (sampled(image, rows + step * down, columns + step * right) for step in steps)
    return sum(weight * each for weight, each in zip(weights / weights.sum(), moved, strict=True))  # type: ignore[no-any-return]


def zoomed(image: Image, factor: float) -> Image:
    """Enlarge about the centre; the size stays."""
    centre = [(side - 1) / 2 for side in image.shape[1:]]
    rows, columns = np.mgrid[: image.shape[1], : image.shape[2]].astype(float)
    return sampled(image, centre[0] + (rows - centre[0]) / factor, centre[1] + (columns - centre[1]) / factor)


def sampled(image: Image, rows: Image, columns: Image) -> Image:
    """Interpolate an image linearly at places."""
    last = [side - 1 for side in image.shape[1:]]
    rows, columns = (abs((each + end) % max(2 * end, 1) - end) for each, end in zip((rows, columns), last, strict=True))
    top, left = (np.minimum(each.astype(int), end) for each, end in zip((rows, columns), last, strict=True))
    bottom, right = np.minimum(top + 1, last[0]), np.minimum(left + 1, last[1])
    down, across = rows - top, columns - left
    upper = image[:, top, left] * (1 - across) + image[:, top, right] * across
    lower = image[:, bottom, left] * (1 - across) + image[:, bottom, right] * across
    return upper * (1 - down) + lower * down  # type: ignore[no-any-return]
