"""Weather and light."""

from __future__ import annotations

import numpy as np

from hocket_tools.judging.corruption_kinds.filters import Generator, Image, filtered, smeared, smoothed, zoomed


def fog(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Add a fractal haze, and scale to the brightest value."""
    amount, decay = parameters
    brightest = image.max()
    height, width = image.shape[1:]
    haze = _plasma(1 << max(height, width, 2).bit_length(), decay, generator)[:height, :width]
    return (image + amount * haze) * brightest / (brightest + amount)  # type: ignore[no-any-return]


def frost(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Mix with crystals: the ridges of two fractals, squared, in grey."""
    kept, amount = parameters
    height, width = image.shape[1:]
    heights = np.stack([_plasma(1 << max(height, width, 2).bit_length(), 1.7, generator) for _ in range(2)])
    ridges = 1 - abs(2 * heights[:, :height, :width] - 1)
    return kept * image + amount * ridges.max(0) ** 2  # type: ignore[no-any-return]


def snow(
    image: Image, parameters: tuple[float, float, float, float, float, float, float], generator: Generator
) -> Image:
    """Whiten, and add flakes that fall at an angle, and the same flakes turned by 180 degrees."""
    mean, deviation, zoom, threshold, radius, sigma, kept = parameters
    flakes = zoomed(generator.normal(mean, deviation, (1, *image.shape[1:])), zoom)
    fallen = smeared(np.where(flakes < threshold, 0, flakes).clip(0, 1), radius, sigma, generator.uniform(-135, -45))
    grey = np.tensordot([0.299, 0.587, 0.114], image, 1) if len(image) == 3 else image.mean(0)
    white = np.maximum(image, 1.5 * grey + 0.5)
    return kept * image + (1 - kept) * white + fallen + fallen[:, ::-1, ::-1]


def spatter(image: Image, parameters: tuple[float, float, float, float, float, bool], generator: Generator) -> Image:
    """Add drops of water, lighter where their surface rises to the lower right, or cover with mud."""
    mean, deviation, sigma, threshold, amount, muddy = parameters
    colour = np.array([63, 42, 20] if muddy else [175, 238, 238])[:, None, None] / 255
    colour = colour if len(image) == 3 else colour.mean(0)
    liquid = smoothed(generator.normal(mean, deviation, (1, *image.shape[1:])), sigma)
    if muddy:
        cover = smoothed((liquid > threshold).astype(float), amount)
        cover[cover < 0.8] = 0
        return image * (1 - cover) + cover * colour
    liquid[liquid < threshold] = 0
    surface = smoothed(liquid, 1) / max(liquid.max(), 1e-9)
    drops = liquid * filtered(surface, np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])).clip(0, 1)
    return image + amount * drops / max(drops.max(), 1e-9) * colour  # type: ignore[no-any-return]


def _plasma(size: int, decay: float, generator: Generator) -> Image:
    """Return a square of heights in [0, 1] by the diamond-square algorithm (Fournier et al. 1982), on a torus."""
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


def brightness(image: Image, amount: float, generator: Generator) -> Image:
    """Add to the value of HSV, the largest channel, and keep hue and saturation."""
    value = image.max(0)
    new = np.clip(value + amount, 0, 1)
    return np.where(value > 0, image * (new / np.where(value > 0, value, 1)), new)  # type: ignore[no-any-return]


def contrast(image: Image, factor: float, generator: Generator) -> Image:
    mean = image.mean((1, 2), keepdims=True)
    return (image - mean) * factor + mean  # type: ignore[no-any-return]


def saturate(image: Image, parameters: tuple[float, float], generator: Generator) -> Image:
    """Scale and shift the saturation of HSV. Grey images, and grey pixels of saturation 0, have a hue of red."""
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
