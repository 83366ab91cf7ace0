"""Distortions, pixels and JPEG."""

from __future__ import annotations

import io

import numpy as np

from hocket.errors import WrongValue
from hocket_tools.judging.corruption_kinds.filters import Generator, Image, sampled, smoothed


def elastic_transform(image: Image, parameters: tuple[float, float, float], generator: Generator) -> Image:
    """Move three corners of a triangle at random, and then each pixel by a smooth random displacement."""
    height, width = image.shape[1:]
    amount, smoothness, shift = (each * min(height, width) for each in parameters)
    centre, reach = np.array([height // 2, width // 2]), min(height, width) // 3
    before = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + generator.uniform(-shift, shift, (3, 2))
    back = np.linalg.solve(np.c_[after, np.ones(3)], before.astype(float))  # from a pixel of the result to its origin
    rows, columns = np.mgrid[:height, :width].astype(float)
    draws = generator.uniform(-1, 1, (2, height, width))
    moved = amount * smoothed(draws, smoothness) if amount else np.zeros_like(draws)
    places = np.stack([rows + moved[0], columns + moved[1], np.ones_like(rows)], -1) @ back
    return sampled(image, places[..., 0], places[..., 1])


def pixelate(image: Image, factor: float, generator: Generator) -> Image:
    """Shrink and enlarge by boxes."""
    for axis in (1, 2):
        length = image.shape[axis]
        less = max(int(length * factor), 1)
        image = np.moveaxis(np.moveaxis(image, axis, -1) @ _boxes(length, less) @ _boxes(less, length), -1, axis)
    return image


def _boxes(length: int, new: int) -> Image:
    """Return weights ``(length, new)`` of the box filter: the overlap of each new pixel with the old ones."""
    support = max(length / new, 1.0) / 2
    centres = (np.arange(new) + 0.5) * length / new
    offsets = np.arange(length)[:, None] + 0.5 - centres
    weights = ((offsets > -support - 1e-9) & (offsets <= support + 1e-9) & ~np.isclose(offsets, -support)).astype(float)
    return weights / weights.sum(0)  # type: ignore[no-any-return]


def jpeg_compression(image: Image, quality: int, generator: Generator) -> Image:
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
