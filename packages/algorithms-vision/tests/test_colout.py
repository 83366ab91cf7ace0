"""ColOut against what its definition says of rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hocket_vision.colout import colout, colout_indices, take


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixel_ids(*shape: int) -> torch.Tensor:
    """Every pixel of an (H, W) plane is its own number, 100 · row + column."""
    plane = torch.arange(shape[-2])[:, None] * 100 + torch.arange(shape[-1])
    return plane.expand(shape).float().clone()


def test_default_probabilities_take_8x8_to_6x6_and_leave_class_targets():
    images, labels = pixel_ids(4, 3, 8, 8), torch.arange(4)
    out, targets = colout(images, labels, generator=seeded())
    assert out.shape == (4, 3, 6, 6)
    assert targets is labels
    assert images.equal(pixel_ids(4, 3, 8, 8))


def test_kept_pixels_form_a_grid_in_order_and_are_the_same_in_all_images():
    out = colout(pixel_ids(5, 2, 9, 12), p_row=0.4, p_col=0.25, generator=seeded(3))
    assert out.shape == (5, 2, 5, 9)  # int(0.6 * 9), int(0.75 * 12)
    rows, columns = out[0, 0, :, 0] // 100, out[0, 0, 0] % 100
    assert (rows.diff() > 0).all() and (columns.diff() > 0).all()
    assert out.equal((rows[:, None] * 100 + columns).expand(5, 2, 5, 9))


def test_masks_lose_what_images_lose():
    images, masks = pixel_ids(2, 3, 8, 8), pixel_ids(2, 8, 8)
    out, small = colout(images, masks, generator=seeded())
    assert small.equal(out[:, 0])
    image, mask = colout(pixel_ids(3, 8, 8), pixel_ids(8, 8), generator=seeded())
    assert mask.equal(image[0])
    dense = colout(images, pixel_ids(2, 5, 8, 8), generator=seeded())[1]
    assert dense.shape == (2, 5, 6, 6)


@pytest.mark.parametrize("targets", [torch.zeros(2, 4, 4), torch.zeros(2, 10), torch.zeros(8, 8), "name", [1, 2]])
def test_targets_that_are_not_pictures_of_the_images_stay(targets):
    assert colout(pixel_ids(2, 3, 8, 8), targets)[1] is targets


def test_resize_target_can_be_forced_and_forbidden():
    images, masks = pixel_ids(2, 3, 8, 8), pixel_ids(2, 8, 8)
    assert colout(images, masks, resize_target=False)[1] is masks
    out, weights = colout(
        images, pixel_ids(8, 8), resize_target=True, generator=seeded()
    )  # one map for the whole batch
    assert weights.equal(out[0, 0])
    with pytest.raises(ValueError, match="as high and wide as the images"):
        colout(images, torch.zeros(2, 4, 4), resize_target=True)
    with pytest.raises(ValueError, match="there are none"):
        colout(images, resize_target=True)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "CMYK", "P", "1", "I", "F", "I;16"])
def test_pil_images_keep_their_mode(mode):
    ramp = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    image = ramp.convert("I").convert("I;16") if mode == "I;16" else ramp.convert(mode)
    out = colout(image, generator=seeded())
    assert (out.mode, out.size) == (mode, (6, 6))
    rows, columns = colout_indices(8, 8, generator=seeded())
    for i, row in enumerate(rows.tolist()):
        for j, column in enumerate(columns.tolist()):
            assert out.getpixel((j, i)) == image.getpixel((column, row))
    assert out.getpalette() == image.getpalette()


def test_pil_mask_follows_pil_image():
    mask = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    image, small = colout(mask.convert("RGB"), mask, generator=seeded())
    assert np.array_equal(np.asarray(image)[..., 0], np.asarray(small))


def test_tv_tensors_remain_what_they_are():
    from torchvision import tv_tensors

    image, mask = tv_tensors.Image(pixel_ids(3, 8, 8)), tv_tensors.Mask(pixel_ids(8, 8))
    out, small = colout(image, mask, generator=seeded())
    assert isinstance(out, tv_tensors.Image) and isinstance(small, tv_tensors.Mask)
    assert small.shape == (6, 6)


def test_gradients_reach_the_pixels_that_stayed():
    images = pixel_ids(1, 1, 4, 4).requires_grad_()
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 3])
    take(images, rows, columns).sum().backward()
    expected = torch.zeros(4, 4)
    expected[0, 1] = expected[0, 3] = expected[2, 1] = expected[2, 3] = 1
    assert images.grad is not None and images.grad[0, 0].equal(expected)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99), st.integers(0, 99), st.integers(0, 2**32))
def test_counts_are_exact_in_percent(height, width, row_percent, column_percent, seed):
    rows, columns = colout_indices(height, width, row_percent / 100, column_percent / 100, generator=seeded(seed))
    assert len(rows) == max(1, (100 - row_percent) * height // 100)
    assert len(columns) == max(1, (100 - column_percent) * width // 100)
    assert rows.tolist() == sorted(set(rows.tolist())) and rows[0] >= 0 and rows[-1] < height


def test_every_row_is_dropped_as_often_as_the_others():
    generator = seeded()
    kept = torch.zeros(10)
    for _ in range(2000):
        kept[colout_indices(10, 1, 0.5, 0.0, generator=generator)[0]] += 1
    assert torch.allclose(kept / 2000, torch.full((10,), 0.5), atol=0.06)  # 5 standard deviations


def test_generator_decides_alone():
    images = pixel_ids(1, 1, 16, 16)
    before = torch.get_rng_state()
    first, again, other = (colout(images, generator=seeded(seed)) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(5)
    first = colout(images)
    torch.manual_seed(5)
    assert colout(images).equal(first)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_probabilities_outside_0_to_1_are_refused(p):
    with pytest.raises(ValueError, match=r"p_row .*\[0, 1\)"):
        colout(torch.zeros(1, 1, 4, 4), p_row=p)
    with pytest.raises(ValueError, match=r"p_col .*\[0, 1\)"):
        colout(torch.zeros(1, 1, 4, 4), p_col=p)


@pytest.mark.parametrize("images", [torch.zeros(4), [torch.zeros(3, 4, 4)], 3])
def test_what_is_no_image_is_refused(images):
    with pytest.raises(TypeError, match="ColOut takes images"):
        colout(images)
