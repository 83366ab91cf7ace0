"""Blur."""

from __future__ import annotations

import math

import numpy as np

from hocket_tools.judging.corruption_kinds.filters import Generator, Image, filtered, smeared, smoothed, zoomed


def gaussian_blur(image: Image, sigma: float, generator: Generator) -> Image:
    return smoothed(image, sigma)


def defocus_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Filter with a disk whose edge is smoothed."""
    radius, edge = parameters
    reach = max(math.ceil(radius), 1) + 1
    offsets = np.arange(-reach, reach + 1)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(float)
    return filtered(image, smoothed((disk / disk.sum())[None], edge, "constant", width=1 if radius <= 8 else 2)[0])


def motion_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Average along a line behind each pixel, at an angle within 45 degrees of the horizontal, with Gaussian weights."""
    return smeared(image, *parameters, generator.uniform(-45, 45))


def glass_blur(image: Image, parameters: tuple[float, int, int], generator: Generator) -> Image:
    """Blur, swap each pixel with a neighbour, from the last to the first, several times, and blur again."""
    sigma, reach, times = parameters
    height, width = image.shape[1:]
    rows, columns = np.mgrid[height - reach : reach : -1, width - reach : reach : -1]
    here, order = (rows * width + columns).ravel(), list(range(height * width))
    for _ in range(times):
        down, right = generator.integers(-reach, reach, (2, len(here)))
        for one, other in zip(here.tolist(), (here + down * width + right).tolist(), strict=True):
            order[one], order[other] = order[other], order[one]
    return smoothed(smoothed(image, sigma).reshape(len(image), -1)[:, order].reshape(image.shape), sigma)


def zoom_blur(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Average an image with enlargements about its centre."""
    largest, step = parameters
    factors = np.arange(1, largest + step / 2, step)
    return (image + sum(zoomed(image, each) for each in factors)) / (len(factors) + 1)
