"""CutMix against what its paper says of boxes and labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.data import Mixture
from hocket_testkit import AlgorithmConformance
from hocket_vision import CutMix
from hocket_vision.boxes import draw_boxes
from hocket_vision.cutmix import cutmix_box, paste
from hocket_vision.functional import cutmix


class TestCutMix(AlgorithmConformance):
    def make(self):
        return CutMix()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(*shape: int) -> torch.Tensor:
    """Every image has its own number."""
    return torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).float()


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.booleans(), st.integers(0, 99))
@settings(deadline=None)
def test_boxes_are_in_the_image_and_no_larger_than_drawn(height, width, share, uniform, seed):
    top, bottom, left, right = cutmix_box(height, width, share, uniform_sampling=uniform, generator=seeded(seed))
    assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
    assert (bottom - top) * (right - left) <= (1 - share) * height * width + 1e-6


def test_a_smaller_share_gives_a_larger_box():
    """Composer's functional form has a length, of which 0.25 gives a box of up to 30 of 32 pixels."""
    largest = {
        share: max(
            bottom - top
            for top, bottom, _, _ in (cutmix_box(32, 32, share, generator=seeded(seed)) for seed in range(50))
        )
        for share in (1.0, 0.9375, 0.75, 0.25)
    }
    assert largest == {1.0: 0, 0.9375: 8, 0.75: 16, 0.25: 27}


def test_labels_are_shared_by_the_pixels_that_stayed():
    images, labels = numbered(8, 3, 16, 12), torch.arange(8)
    for seed in range(20):
        mixed, targets = cutmix(images, labels, generator=seeded(seed))
        stayed = (mixed == images).flatten(1).double().mean(1)
        moved = targets.second != labels
        assert torch.allclose(stayed[moved], torch.tensor(targets.share).double())
        for image, first, second in zip(mixed, targets.first, targets.second, strict=True):
            assert set(image.unique().tolist()) <= {float(first), float(second)}
    assert images.equal(numbered(8, 3, 16, 12))


def test_uniform_sampling_covers_all_pixels_alike():
    """Without it, those at the borders are covered about half as often."""

    def covered(uniform):
        cover = torch.zeros(9)
        for top, bottom, _, _ in draw_boxes(9, 9, 5, 5, 6000, uniform_sampling=uniform, generator=seeded()).tolist():
            cover[top:bottom] += 1 / 6000
        return cover

    assert torch.allclose(covered(True), torch.full((9,), 5 / 13), atol=0.035)  # 5 of 13 places; 5 standard deviations
    assert covered(False)[0] < 0.7 * covered(False)[4]


@pytest.mark.parametrize("shape", [(4, 16, 12), (4, 5, 16, 12)])
def test_masks_get_the_box_too(shape):
    images, masks = numbered(4, 3, 16, 12), numbered(*shape).long()
    changed = 0
    for seed in range(5):
        mixed, pasted = cutmix(images, masks, generator=seeded(seed))
        expected = mixed[:, 0] if len(shape) == 3 else mixed[:, :1].expand(shape)
        assert not isinstance(pasted, Mixture) and pasted.equal(expected.long())
        changed += not pasted.equal(masks)
    assert changed


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_keeps_dtype_and_memory_format(dtype):
    images = numbered(4, 3, 8, 8).to(dtype).contiguous(memory_format=torch.channels_last)
    mixed = paste(images, torch.tensor([1, 2, 3, 0]), (2, 5, 0, 3))
    assert mixed.dtype is dtype and mixed.is_contiguous(memory_format=torch.channels_last)
    expected = images.clone()
    expected[:, :, 2:5, 0:3] = images.roll(-1, 0)[:, :, 2:5, 0:3]
    assert mixed.equal(expected)


def test_what_is_no_image_is_refused():
    with pytest.raises(TypeError, match=r"cutmix takes a batch of images.*\(4, 5\)"):
        cutmix(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="alpha"):
        CutMix(alpha=-0.5)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_segmentation_trains_on_pasted_masks(microbatch):
    images, masks = torch.rand(8, 1, 6, 6, generator=seeded(2)), torch.randint(0, 2, (8, 6, 6), generator=seeded(3))
    trainer = hocket.Trainer(
        model=nn.Conv2d(1, 2, 1), loss=F.cross_entropy, train_data=[(images, masks)], optimizer="sgd(lr=0.1)", duration="2ep",
        device="cpu", algorithms=["cutmix"], microbatch=microbatch, checkpoints=False, seed=1,
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.batch[1].shape == masks.shape and not trainer.state.batch[1].equal(masks)
