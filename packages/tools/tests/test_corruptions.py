"""Corruptions against scipy, Pillow and colorsys, and what they promise of random numbers."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
import torch

from hocket_tools import CORRUPTIONS, corrupt

Image = pytest.importorskip("PIL.Image")
ndimage = pytest.importorskip("scipy.ndimage")
stats = pytest.importorskip("scipy.stats")
load_sample_image = pytest.importorskip("sklearn.datasets").load_sample_image

PHOTO = np.array(load_sample_image("china.jpg"), dtype=np.float64)[100:180, 200:300] / 255
SMALL = torch.tensor(PHOTO).permute(2, 0, 1)[None, :, :32, :40]
LARGE = torch.tensor(PHOTO).permute(2, 0, 1)[None]
IMAGES = {"small": SMALL, "large": LARGE}


def array(images: torch.Tensor) -> Any:
    return images[0].numpy()


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruptions_grow_and_depend_on_nothing_but_seed_and_place(kind: str) -> None:
    images = SMALL.float().expand(3, -1, -1, -1)
    for severity in (1, 5):
        found = corrupt(images, kind, severity, seed=4, places=[7, 8, 9])
        assert found.shape == images.shape and found.dtype == torch.float32 and found.min() >= 0 and found.max() <= 1
        assert not torch.equal(found, images)
        assert torch.equal(corrupt(images[1:2], kind, severity, seed=4, places=[8])[0], found[1])
    is_random = not torch.equal(found[0], found[1])
    seeded = ("motion-blur", "glass-blur", "snow", "frost", "fog", "spatter", "elastic-transform")
    assert is_random == (kind.endswith("noise") or kind in seeded)
    if is_random:
        assert not torch.equal(corrupt(images, kind, severity, seed=5, places=[7, 8, 9])[0], found[0])
    away = [(corrupt(LARGE, kind, each) - LARGE).abs().mean().item() for each in (1, 3, 5)]
    # The first severities of three are of another kind, and the frost of one image is lighter than that of another.
    if kind not in ("saturate", "elastic-transform", "spatter", "frost"):
        assert away == sorted(away)


def test_noise_has_its_distribution() -> None:
    grey = torch.full((1, 3, 200, 200), 0.5, dtype=torch.float64)
    noise = array(corrupt(grey, "gaussian-noise", 1)) - 0.5
    assert stats.kstest(noise.ravel(), "norm", (0, 0.08)).pvalue > 0.001
    counts = array(corrupt(grey, "shot-noise", 2)) * 25
    assert counts.mean() == pytest.approx(12.5, abs=0.05) and counts.var() == pytest.approx(12.5, rel=0.03)
    assert np.allclose(counts, counts.round())
    spots = array(corrupt(grey, "impulse-noise", 3))
    assert (spots == 0).mean() == pytest.approx(0.045, abs=0.003) == (spots == 1).mean()
    speckle = array(corrupt(grey * 0.5, "speckle-noise", 1))
    assert speckle.std() == pytest.approx(0.25 * 0.15, rel=0.02)


@pytest.mark.parametrize("severity", [1, 4])
@pytest.mark.parametrize("size", IMAGES)
def test_gaussian_blur_is_that_of_scipy(size: str, severity: int) -> None:
    sigma = {"small": [0.4, 0.6, 0.7, 0.8], "large": [1, 2, 3, 4]}[size][severity - 1]
    expected = ndimage.gaussian_filter(array(IMAGES[size]), (0, sigma, sigma), mode="reflect", truncate=4)
    assert np.allclose(
        array(corrupt(IMAGES[size], "gaussian-blur", severity)), expected, atol=1e-4 if sigma < 1 else 1e-9
    )


def test_defocus_is_the_mean_over_a_disk() -> None:
    rows, columns = np.mgrid[-3:4, -3:4]
    disk = (rows**2 + columns**2 <= 9).astype(float)
    expected = ndimage.convolve(array(LARGE), disk[None] / disk.sum(), mode="reflect")
    assert np.allclose(array(corrupt(LARGE, "defocus-blur", 1)), expected, atol=1e-9)  # its edge has a sigma of 0.1


def test_zoom_is_the_mean_of_enlargements() -> None:
    image = array(SMALL)
    centre = (np.array(image.shape[1:]) - 1) / 2
    zoomed = []
    for factor in (1, 1.01, 1.02, 1.03, 1.04, 1.05):
        offset = centre - centre / factor
        zoomed.append(
            [ndimage.affine_transform(each, np.eye(2) / factor, offset, order=1, mode="nearest") for each in image]
        )
    expected = (image + np.sum(zoomed, 0)) / 7
    assert np.allclose(array(corrupt(SMALL, "zoom-blur", 1)), expected, atol=1e-9)


def test_motion_keeps_constant_images_and_smears_points_along_a_line() -> None:
    grey = torch.full((1, 1, 32, 32), 0.3, dtype=torch.float64)
    assert torch.allclose(corrupt(grey, "motion-blur", 5), grey)
    point = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
    point[..., 32, 32] = 1
    smeared = array(corrupt(point, "motion-blur", 5))[0]
    assert smeared.sum() == pytest.approx(1, abs=0.02)
    rows, columns = np.nonzero(smeared > 1e-3)
    slope, *_ = np.polyfit(columns, rows, 1, w=smeared[rows, columns])
    assert abs(slope) <= 1.1 and columns.max() <= 33 and np.abs(rows - 32 - slope * (columns - 32)).max() < 1.5


def test_glass_moves_pixels_to_neighbours_and_keeps_their_mean() -> None:
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    places = torch.stack([rows, columns])[None].double() / 32
    found = array(corrupt(places, "glass-blur", 1)) * 32  # its blur has a sigma of 0.05
    pixels = sorted(map(tuple, found.reshape(2, -1).round(6).T))
    assert pixels == [(row, column) for row in range(32) for column in range(32)]  # each once
    away = np.abs(found - array(places) * 32).max(0)
    assert np.median(away) == 1 and np.quantile(away, 0.9) <= 3 and away[0].max() < 1e-9
    blurred = array(corrupt(LARGE, "glass-blur", 5))
    assert np.allclose(blurred.mean((1, 2)), array(LARGE).mean((1, 2)))
    twice = ndimage.gaussian_filter(array(LARGE), (0, 1.5 * 2**0.5, 1.5 * 2**0.5), mode="reflect")
    assert 0.01 < np.abs(blurred - twice).mean() < 0.05  # that of two blurs, and the swaps


@pytest.mark.parametrize("size", IMAGES)
def test_frost_is_added_to_what_is_left_of_the_image(size: str) -> None:
    for severity, kept, amount in {"small": [(1, 1, 0.2), (5, 0.75, 0.45)], "large": [(1, 1, 0.4), (5, 0.6, 0.75)]}[
        size
    ]:
        crystals = array(corrupt(torch.zeros_like(IMAGES[size]), "frost", severity))
        assert crystals.max() <= amount and 0.2 < crystals.mean() / amount < 0.8 and (crystals == crystals[:1]).all()
        expected = np.clip(kept * array(IMAGES[size]) + crystals, 0, 1)
        assert np.allclose(array(corrupt(IMAGES[size], "frost", severity)), expected)


def test_snow_whitens_and_adds_flakes_in_pairs() -> None:
    colour = torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 60, 72)
    grey = 0.299 * 0.1 + 0.587 * 0.3 + 0.114 * 0.2
    white = 0.8 * np.array([0.1, 0.3, 0.2]) + 0.2 * np.maximum([0.1, 0.3, 0.2], 1.5 * grey + 0.5)
    found = array(corrupt(colour, "snow", 1))
    flakes = found[0] - white[0]
    assert flakes.min() >= -1e-9 and np.allclose(flakes, flakes[::-1, ::-1]) and 0.01 < flakes.mean() < 0.3
    assert np.allclose(found, np.where(found[0] < 1, white[:, None, None] + flakes, 1).clip(0, 1))
    # they fall, so that columns change less along their length than rows do
    assert np.abs(np.diff(flakes, axis=0)).mean() < 0.8 * np.abs(np.diff(flakes, axis=1)).mean()


@pytest.mark.parametrize("size", IMAGES)
def test_water_is_light_and_mud_covers(size: str) -> None:
    black, white = torch.zeros_like(IMAGES[size]), torch.ones_like(IMAGES[size])
    water = array(corrupt(black, "spatter", 2))
    most = {"small": 0.5, "large": 0.6}[size]
    assert np.allclose(water.max((1, 2)), most * np.array([175, 238, 238]) / 255)
    assert np.allclose(array(corrupt(white * 0.3, "spatter", 2)), 0.3 + water) and 0.02 < (water[0] > 0).mean() < 0.7
    mud = array(corrupt(black, "spatter", 4))
    cover = mud / np.array([63, 42, 20])[:, None, None] * 255
    assert np.allclose(cover, cover[:1]) and ((cover[0] == 0) | (cover[0] > 0.8 - 1e-9)).all() and cover.max() > 0.9
    assert np.allclose(array(corrupt(white, "spatter", 4)), 1 - cover + mud)
    assert np.allclose(array(corrupt(black[:, :1], "spatter", 4)), mud.mean(0))  # grey


@pytest.mark.parametrize(
    ("kind", "factor", "shift"), [("brightness", None, 0.2), ("saturate", 0.1, 0), ("saturate", 5, 0.1)]
)
def test_colours_change_in_hsv(kind: str, factor: float | None, shift: float) -> None:
    def changed(pixel: Any) -> tuple[float, float, float]:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        if factor is None:
            return colorsys.hsv_to_rgb(hue, saturation, min(value + shift, 1))
        return colorsys.hsv_to_rgb(hue, min(saturation * factor + shift, 1), value)

    image = PHOTO.copy()
    image[0, :3] = [[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5]]
    expected = np.apply_along_axis(changed, -1, image)
    severity = 2 if factor != 5 else 4
    found = array(corrupt(torch.tensor(image).permute(2, 0, 1)[None], kind, severity))
    assert np.allclose(np.moveaxis(found, 0, -1), expected, atol=1e-9)


def test_contrast_scales_about_the_mean() -> None:
    image = array(LARGE)
    mean = image.mean((1, 2), keepdims=True)
    assert np.allclose(array(corrupt(LARGE, "contrast", 3)), mean + 0.2 * (image - mean))


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("size", IMAGES)
def test_pixels_are_boxes_as_those_of_pillow(size: str, severity: int) -> None:
    factor = {"small": [0.95, 0.9, 0.85, 0.75, 0.65], "large": [0.6, 0.5, 0.4, 0.3, 0.25]}[size][severity - 1]
    for channel, found in zip(array(IMAGES[size]), array(corrupt(IMAGES[size], "pixelate", severity)), strict=True):
        image = Image.fromarray(channel.astype(np.float32))
        less = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BOX)
        assert np.allclose(found, np.asarray(less.resize(image.size, Image.Resampling.BOX)), atol=1e-5)


def test_elastic_moves_corners_only_at_the_first_small_severity() -> None:
    # three corners of a triangle move, so that a plane of brightness stays a plane
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    plane = ((rows + 2 * columns) / 200 + 0.2).double()[None, None]
    found = array(corrupt(plane, "elastic-transform", 1))[0, 8:24, 8:24]
    inside = np.stack([np.ones(256), *(each[8:24, 8:24].reshape(-1).numpy() for each in (rows, columns))], 1)
    _, residual, *_ = np.linalg.lstsq(inside, found.reshape(-1), rcond=None)
    assert residual[0] < 1e-12 and not np.allclose(found, plane[0, 0, 8:24, 8:24])


def test_grey_images_and_jpeg() -> None:
    grey = LARGE[:, :1]
    for kind in CORRUPTIONS:
        assert corrupt(grey, kind, 3).shape == grey.shape
    with pytest.raises(ValueError, match="1 or 3 channels"):
        corrupt(torch.zeros(1, 2, 32, 32), "jpeg-compression", 1)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'gaussian-noise'"):
        corrupt(SMALL, "gaussian_noise", 1)
    with pytest.raises(ValueError, match="severity=6"):
        corrupt(SMALL, "fog", 6)
    with pytest.raises(ValueError, match="Undo their normalization"):
        corrupt(SMALL * 4 - 2, "fog", 1)
    with pytest.raises(ValueError, match=r"floats \(N, C, H, W\)"):
        corrupt(torch.zeros(3, 32, 32), "fog", 1)
