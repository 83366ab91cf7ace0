"""AugMix against the formula of arXiv 1912.02781 and operations recomputed with PIL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as F

from hocket_vision.augmix import AUGMENTATION_SETS, augmix, draw_augmentation, mix_chains


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photo(height: int = 12, width: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=seeded(9))


def invert(image):
    return F.invert(image)


def darken(image):
    return F.adjust_brightness(image, 0.5)


def test_mixture_is_the_weighted_sum_of_the_formula():
    image = torch.rand(3, 5, 4, generator=seeded())
    out = mix_chains(image, [[invert], [darken, invert], []], [0.2, 0.5, 0.3], m=0.6)
    expected = 0.4 * image + 0.6 * (0.2 * (1 - image) + 0.5 * (1 - image / 2) + 0.3 * image)
    torch.testing.assert_close(out, expected)


def test_integer_images_are_rounded_and_pil_images_go_the_same_way():
    image = photo()
    weights, m = [0.25, 0.75], 0.4
    pixels = image.double()
    expected = (0.6 * pixels + 0.4 * (0.25 * (255 - pixels) + 0.75 * pixels)).round().to(torch.uint8)
    assert mix_chains(image, [[invert], []], weights, m).equal(expected)
    out = mix_chains(F.to_pil_image(image), [[invert], []], weights, m)
    assert out.mode == "RGB" and F.pil_to_tensor(out).equal(expected)


def test_unaugmented_chains_give_the_image_back():
    image = photo()
    assert mix_chains(image, [[], [], []], [0.3, 0.3, 0.4], m=0.7).equal(image)  # truncation would darken it by one


def test_each_chain_needs_a_weight():
    with pytest.raises(ValueError, match="2 chains and 1 weights"):
        mix_chains(photo(), [[], []], [1.0], 0.5)


def test_the_sets_are_those_of_the_paper_and_of_composer():
    safe = set(AUGMENTATION_SETS["safe"])
    assert len(safe) == 9 and not {"color", "contrast", "brightness", "sharpness"} & safe
    assert set(AUGMENTATION_SETS["all"]) - safe == {"color", "contrast", "brightness", "sharpness"}
    originals = {"color_original", "contrast_original", "brightness_original", "sharpness_original"}
    assert set(AUGMENTATION_SETS["original"]) - safe == originals


def test_operations_without_strength_equal_pil():
    image = F.to_pil_image(photo())
    assert draw_augmentation("equalize", 3, 12, 16)(image).tobytes() == ImageOps.equalize(image).tobytes()
    assert draw_augmentation("autocontrast", 3, 12, 16)(image).tobytes() == ImageOps.autocontrast(image).tobytes()


def outcomes(name: str, severity: float, image: Image.Image, draws: int = 300) -> set[bytes]:
    generator = seeded(4)
    return {
        draw_augmentation(name, severity, image.height, image.width, generator=generator)(image).tobytes()
        for _ in range(draws)
    }


def test_posterize_solarize_and_rotate_draw_the_documented_strengths():
    image = F.to_pil_image(photo())
    # L ~ U(0.1, 10): int(0.4 L) is 0 to 3, int(25.6 L) 2 to 255, int(3 L) 0 to 29.
    assert outcomes("posterize", 10, image) == {ImageOps.posterize(image, bits).tobytes() for bits in (4, 3, 2, 1)}
    assert outcomes("solarize", 10, image) <= {ImageOps.solarize(image, t).tobytes() for t in range(1, 255)}
    angles = {image.rotate(sign * a, Image.Resampling.BILINEAR).tobytes() for a in range(30) for sign in (-1, 1)}
    drawn = outcomes("rotate", 10, image)
    assert drawn <= angles and len(drawn) > 40
    # L ~ U(0.1, 1): too weak for either
    assert outcomes("posterize", 1, image) == {ImageOps.posterize(image, 4).tobytes()}


def shifted(image: Image.Image, dx: float, dy: float) -> bytes:
    return image.transform(image.size, Image.Transform.AFFINE, (1, 0, -dx, 0, 1, -dy)).tobytes()


def test_translations_stay_within_a_third_of_the_side():
    image = F.to_pil_image(photo(12, 60))
    drawn = outcomes("translate_x", 10, image, draws=1500)
    assert drawn == {shifted(image, dx, 0) for dx in range(-19, 20)}  # int(L * 60 / 30), L < 10
    image = F.to_pil_image(photo(60, 12))
    assert outcomes("translate_y", 10, image, draws=1500) == {shifted(image, 0, dy) for dy in range(-19, 20)}


def test_shears_move_rows_in_proportion_to_their_number():
    image = torch.zeros(1, 40, 40)
    image[:, :, 20] = 1
    for name, rows in (("shear_x", lambda out: out[0]), ("shear_y", lambda out: out[0].T)):
        source = image if name == "shear_x" else image.transpose(1, 2)
        slopes = []
        for seed in range(60):
            out = rows(draw_augmentation(name, 3, 40, 40, generator=seeded(seed))(source))
            centres = (out * torch.arange(40)).sum(1) / out.sum(1)
            slopes.append(((centres[39] - centres[0]) / 39).item())
        assert max(map(abs, slopes)) <= 0.09 + 0.003 and max(slopes) > 0.06 and min(slopes) < -0.06


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_enhancements_draw_from_both_sides_of_one(name):
    from hocket_vision.augmix import OPERATIONS, _Draw

    draw = OPERATIONS[name][1]
    assert draw is not None
    drawn = _Draw(3, 8, 8, seeded())
    factors = np.array([draw(drawn) for _ in range(3000)])
    scale = 0.75 if name == "brightness" else 1.0
    low, high = factors[factors <= 1], factors[factors > 1]
    assert factors.min() >= 0.73 and 2.9 * scale < factors.max() <= 3 * scale
    if name != "brightness":
        assert abs(len(low) / 3000 - 0.5) < 0.05
        assert abs(high.mean() - 2.0) < 0.1 and abs(low.mean() - 0.865) < 0.01
    original = OPERATIONS[f"{name}_original"][1]
    assert original is not None
    factors = np.array([original(drawn) for _ in range(1000)])
    assert 0.118 <= factors.min() < 0.13 and 0.63 < factors.max() <= 0.64


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_weights_are_dirichlet_and_shares_beta(alpha):
    from hocket_vision.augmix import _Draw

    draw = _Draw(3, 8, 8, seeded())
    weights = np.array([draw.dirichlet(alpha, 3) for _ in range(4000)])
    np.testing.assert_allclose(weights.sum(1), 1)
    variance = (1 / 3) * (2 / 3) / (3 * alpha + 1)
    np.testing.assert_allclose(weights.mean(0), 1 / 3, atol=6 * math.sqrt(variance / 4000))
    np.testing.assert_allclose(weights.var(0), variance, rtol=0.15)
    shares = np.array([draw.dirichlet(alpha, 2)[0] for _ in range(4000)])
    np.testing.assert_allclose(shares.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.15)


@pytest.mark.parametrize("augmentation_set", ["all", "safe", "original"])
@pytest.mark.parametrize("channels", [1, 3])
def test_kind_size_and_dtype_stay(augmentation_set, channels):
    image = photo(9, 7, channels)
    for seed in range(12):
        out = augmix(image, 5, augmentation_set=augmentation_set, generator=seeded(seed))
        assert (out.shape, out.dtype) == (image.shape, torch.uint8)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            real = augmix(image.to(dtype) / 255, 5, augmentation_set=augmentation_set, generator=seeded(seed))
            assert (real.shape, real.dtype) == (image.shape, dtype) and real.min() >= 0 and real.max() <= 1
        pil = augmix(F.to_pil_image(image), 5, augmentation_set=augmentation_set, generator=seeded(seed))
        assert pil.mode == ("L" if channels == 1 else "RGB") and pil.size == (7, 9)


def test_the_three_kinds_of_image_are_augmented_alike():
    """Smooth, so that PIL's and torchvision's interpolations agree; the draws must then be the same for each kind."""
    ramp = torch.linspace(40, 215, 32).repeat(3, 32, 1).round().to(torch.uint8)
    for seed in range(20):
        settings = dict(severity=3, augmentation_set="safe", generator=seeded(seed))
        tensor = augmix(ramp, **settings).float()
        settings["generator"] = seeded(seed)
        real = augmix(ramp.float() / 255, **settings) * 255
        settings["generator"] = seeded(seed)
        pil = F.pil_to_tensor(augmix(F.to_pil_image(ramp), **settings)).float()
        assert (tensor - real).abs().mean() < 1.5 and (tensor - pil).abs().mean() < 3


def test_input_is_not_changed_and_output_differs():
    image = photo()
    copy = image.clone()
    assert any(not augmix(image, generator=seeded(seed)).equal(copy) for seed in range(5))
    assert image.equal(copy)


def test_generator_decides_alone():
    image = photo()
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (augmix(image, generator=seeded(seed)) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    assert torch.get_rng_state().equal(before) and (np.random.get_state()[1] == numpy_before).all()
    torch.manual_seed(3)
    first = augmix(image)
    torch.manual_seed(3)
    assert augmix(image).equal(first)


def test_depth_and_width_set_how_many_operations_run(monkeypatch):
    import hocket_vision.augmix as module

    lengths: list[list[int]] = []
    original = module.mix_chains
    monkeypatch.setattr(
        module, "mix_chains", lambda i, chains, w, m: lengths.append([*map(len, chains)]) or original(i, chains, w, m)
    )
    augmix(photo(), depth=2, width=4)
    assert lengths.pop() == [2, 2, 2, 2]
    for seed in range(30):
        augmix(photo(), generator=seeded(seed))
    assert {length for chain in lengths for length in chain} == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"severity": 11}, "severity"),
        ({"severity": -1}, "severity"),
        ({"depth": 0}, "depth"),
        ({"depth": -2}, "depth"),
        ({"width": 0}, "width"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"augmentation_set": "some"}, "augmentation_set must be one of all, safe, original"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        augmix(photo(), **settings)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.zeros(2, 3, 4, 4), ValueError, "one image"),
        (torch.zeros(3, 4, 4) - 0.5, ValueError, "before normalization"),
        (torch.full((3, 4, 4), float("nan")), ValueError, "before normalization"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), TypeError, "int64"),
        (torch.zeros(4, 4, 4), ValueError, "1 or 3 channels"),
        (Image.new("RGBA", (4, 4)), ValueError, "convert"),
        (np.zeros((4, 4, 3)), TypeError, "ndarray"),
    ],
)
def test_images_it_cannot_work_on_are_refused(image, error, message):
    with pytest.raises(error, match=message):
        augmix(image)
