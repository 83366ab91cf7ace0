"""Noise."""

from __future__ import annotations

import numpy as np

from hocket_tools.judging.corruption_kinds.filters import Generator, Image


def gaussian_noise(image: Image, scale: float, generator: Generator) -> Image:
    return image + generator.normal(scale=scale, size=image.shape)


def shot_noise(image: Image, photons: float, generator: Generator) -> Image:
    return generator.poisson(image.clip(0, 1) * photons) / photons


def impulse_noise(image: Image, amount: float, generator: Generator) -> Image:
    """Replace a fraction of the values by 0 or 1 (salt and pepper)."""
    draws = generator.random((2, *image.shape))
    return np.where(draws[0] < amount, (draws[1] < 0.5).astype(float), image)


def speckle_noise(image: Image, scale: float, generator: Generator) -> Image:
    return image + image * generator.normal(scale=scale, size=image.shape)
