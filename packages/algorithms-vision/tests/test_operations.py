"""The operations of AugMix and RandAugment against PIL, one by one and batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms.v2 import functional as F

from hocket_vision.image_operations import AUGMENTATION_SETS, OPERATIONS, Draw, Layer, draw_layers, operate
from hocket_vision.kernels import shift, warp


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(count: int, channels: int = 3, height: int = 21, width: int = 32) -> torch.Tensor:
    """Smooth images with some noise, each over another range of values."""
    coarse = torch.rand(count, channels, 4, 5, generator=seeded(9))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)
    noisy = 0.9 * smooth + 0.1 * torch.rand(count, channels, height, width, generator=seeded(8))
    return (torch.linspace(120, 255, count).view(-1, 1, 1, 1) * noisy).round().to(torch.uint8)


def transformed(*matrix: float):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def enhanced(kind: type, factor: float):
    return lambda image: kind(image).enhance(factor)


#: Operation and strength, and the same with PIL.
CASES = {
    ("autocontrast", 0.0): ImageOps.autocontrast,
    ("equalize", 0.0): ImageOps.equalize,
    **{("posterize", bits): lambda image, bits=bits: ImageOps.posterize(image, bits) for bits in (1, 2, 3, 4)},
    **{("solarize", t): lambda image, t=t: ImageOps.solarize(image, t) for t in (0, 1, 26, 255, 256)},
    **{("rotate", a): lambda image, a=a: image.rotate(a, Image.Resampling.BILINEAR) for a in (-27, 0, 13)},
    **{("shear_x", s): transformed(1, s, 0, 0, 1, 0) for s in (-0.27, 0.1)},
    **{("shear_y", s): transformed(1, 0, 0, s, 1, 0) for s in (-0.27, 0.1)},
    **{("translate_x", by): transformed(1, 0, by, 0, 1, 0) for by in (-9, 0, 4)},
    **{("translate_y", by): transformed(1, 0, 0, 0, 1, by) for by in (-7, 0, 4)},
    **{("color", f): enhanced(ImageEnhance.Color, f) for f in (0.1, 0.7, 2.9)},
    **{("contrast", f): enhanced(ImageEnhance.Contrast, f) for f in (0.1, 0.7, 2.9)},
    **{("brightness", f): enhanced(ImageEnhance.Brightness, f) for f in (0.1, 0.7, 2.9)},
    **{("sharpness", f): enhanced(ImageEnhance.Sharpness, f) for f in (0.1, 0.7, 2.9)},
}
#: PIL truncates interpolated values, where ours are rounded; and its stretching of contrasts rounds in floating point.
WITHIN_ONE = ("rotate", "shear_x", "shear_y", "autocontrast")


def with_pil(images: torch.Tensor, layer: Layer) -> torch.Tensor:
    results = []
    for image, *case in zip(images, *layer, strict=True):
        results.append(F.pil_to_tensor(CASES[tuple(case)](F.to_pil_image(image))))
    return torch.stack(results)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_operation_is_that_of_pil(case, channels):
    name, strength = case
    images = photos(6, channels)
    expected, got = with_pil(images, Layer([name] * 6, [strength] * 6)), images.clone()
    operate(got, Layer([name] * 6, [strength] * 6))
    difference = (got.int() - expected.int()).abs()
    assert difference.max() <= (name in WITHIN_ONE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_floating_point_is_the_same_without_rounding(case):
    name, strength = case
    images = photos(6)
    layer = Layer([name] * 6, [strength] * 6)
    got = images.clone()
    operate(got, layer)
    for dtype in (torch.float32, torch.float64):
        real = images.to(dtype) / 255
        operate(real, layer)
        assert real.dtype == dtype and real.min() >= 0 and real.max() <= 1 + 1e-6
        if name != "posterize":  # which is to 2^bits levels from 0 to 1 - 2^-bits in one and from 0 to 255 in the other
            assert (real * 255 - got).abs().max() <= 1.51 * max(1.0, strength if name in ENHANCED else 1.0)


ENHANCED = ("color", "contrast", "brightness", "sharpness")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_batch_of_all_operations_is_each_image_alone(dtype):
    """Same draws, one interpolation for all geometry: bitwise for tones, up to float rounding for geometry."""
    names, strengths = [name for name, _ in CASES], [float(strength) for _, strength in CASES]
    images = photos(len(CASES) + 1)
    images = images / 255 if dtype.is_floating_point else images
    layer = Layer([None, *names], [0.0, *strengths])
    batched = images.clone()
    operate(batched, layer)
    for index, (name, strength) in enumerate(zip(*layer, strict=True)):
        alone = images[index : index + 1].clone()
        operate(alone, Layer([name], [strength]))
        difference = (alone[0].double() - batched[index].double()).abs().max()
        geometry = name is not None and OPERATIONS[name].matrix is not None
        assert difference <= ((1 if dtype == torch.uint8 else 1e-4) if geometry else 0), name
    assert batched[0].equal(images[0])


def test_parts_that_fit_the_cache_give_what_one_part_gives(monkeypatch):
    images, layer = photos(40), Layer([*("rotate", "sharpness", "equalize", "color") * 10], [1.5] * 40)
    one, small = images.clone(), images.clone()
    operate(one, layer)
    monkeypatch.setattr("hocket_vision.image_operations._CACHED_PIXELS", 5000)
    operate(small, layer)
    assert small.equal(one)


def test_whole_pixels_are_copied_as_they_would_be_interpolated():
    images = photos(4)
    matrices = torch.tensor([(1.0, 0, right, 0, 1, down) for right, down in ((0, 0), (3, -2), (-10, 0), (0, 7))])
    assert shift(images, matrices).equal(warp(images, matrices))


def test_a_flat_image_stays_flat():
    flat = torch.stack([torch.full((3, 5, 5), value, dtype=torch.uint8) for value in (0, 7, 255)])
    for name in ("autocontrast", "equalize"):
        for images in (flat, flat / 255):
            got = images.clone()
            operate(got, Layer([name] * 3, [0.0] * 3))
            assert got.equal(images)


def test_images_smaller_than_a_filter_stay():
    images = photos(2, height=2, width=9)
    got = images.clone()
    operate(got, Layer(["sharpness"] * 2, [2.0] * 2))
    assert got.equal(images)


def test_the_sets_are_those_of_the_paper_and_of_composer():
    safe = set(AUGMENTATION_SETS["safe"])
    assert len(safe) == 9 and not set(ENHANCED) & safe
    assert set(AUGMENTATION_SETS["all"]) - safe == set(ENHANCED)
    geometry = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}
    assert set(AUGMENTATION_SETS["tone"]) == set(AUGMENTATION_SETS["original"]) - geometry
    assert set(AUGMENTATION_SETS["original"]) - safe == {f"{name}_original" for name in ENHANCED}


def drawn(name: str, severity: float, size: tuple[int, int] = (12, 60), count: int = 4000) -> np.ndarray:
    """Strengths of one operation, among the draws of all."""
    images = torch.empty(count, 1, *size)
    augmentation_set = "original" if name.endswith("_original") else "all"
    layers = draw_layers(3, images, augmentation_set, severity, generator=seeded(4))
    return np.array([s for layer in layers for n, s in zip(*layer, strict=True) if n == name])


def test_strengths_follow_from_the_level_as_documented():
    # L ~ U(0.1, 10): int(0.4 L) is 0 to 3, int(25.6 L) 2 to 255, int(3 L) 0 to 29, int(2 L) 0 to 19.
    assert set(drawn("posterize", 10)) == {4, 3, 2, 1}
    assert (
        drawn("solarize", 10).min() >= 1
        and drawn("solarize", 10).max() <= 254
        and len(set(drawn("solarize", 10))) > 200
    )
    assert set(drawn("rotate", 10)) == set(range(-29, 30))
    assert set(drawn("translate_x", 10)) == set(range(-19, 20))
    assert set(drawn("translate_y", 10)) == set(range(-3, 4))  # int(0.4 L)
    for name in ("shear_x", "shear_y"):
        slopes = drawn(name, 3)
        assert 0.085 < slopes.max() <= 0.09 and -0.09 <= slopes.min() < -0.085 and np.abs(slopes).min() >= 0.003
    assert set(drawn("posterize", 1)) == {4}  # L ~ U(0.1, 1): too weak


@pytest.mark.parametrize("name", ENHANCED)
def test_enhancements_draw_from_both_sides_of_one(name):
    factors = drawn(name, 3)
    scale = 0.75 if name == "brightness" else 1.0
    assert factors.min() >= 0.73 and 2.9 * scale < factors.max() <= 3 * scale
    if name != "brightness":
        low, high = factors[factors <= 1], factors[factors > 1]
        assert abs(len(low) / len(factors) - 0.5) < 0.08
        assert abs(high.mean() - 2.0) < 0.15 and abs(low.mean() - 0.865) < 0.02
    factors = drawn(f"{name}_original", 3)
    assert 0.118 <= factors.min() < 0.13 and 0.63 < factors.max() <= 0.64


@pytest.mark.parametrize(("severity", "expected"), [(9, (1, 27, 26, 0.27, 18, 1.72)), (3, (3, 9, 180, 0.09, 6, 0.64))])
def test_a_constant_magnitude_is_that_of_the_severity(severity, expected):
    bits, degrees, threshold, slope, pixels, factor = expected
    at = Draw(1.0, True, severity, 12, 60)
    names = ("posterize", "rotate", "solarize", "shear_x", "translate_x", "color_original")
    got = [OPERATIONS[name].strength(at) for name in names]
    np.testing.assert_allclose(got, [bits, degrees, threshold, slope, pixels, factor])
    down = at._replace(up=False)
    np.testing.assert_allclose(
        [OPERATIONS[n].strength(down) for n in names], [bits, -degrees, threshold, -slope, -pixels, factor]
    )


def test_posterize_leaves_at_least_one_bit():
    assert OPERATIONS["posterize"].strength(Draw(1.0, True, 10, 8, 8)) == 1  # 4 - int(0.4 * 10) would be a black image


def test_operations_are_drawn_evenly_and_for_each_image():
    names = AUGMENTATION_SETS["original"]
    layers = draw_layers(2, torch.empty(7000, 3, 8, 8), "original", 9, identity=True, generator=seeded())
    for layer in layers:
        shares = np.array([layer.names.count(name) for name in (None, *names)]) / 7000
        np.testing.assert_allclose(shares, 1 / 14, atol=6 * np.sqrt(1 / 14 / 7000))
    assert layers[0].names != layers[1].names
