"""Progressive resizing against its schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket_testkit import AlgorithmConformance
from hocket_vision import ColOut, CutOut, ProgressiveResizing
from hocket_vision.functional import resize_batch
from hocket_vision.progressive_resizing import resized, scale_at


class TestProgressiveResizing(AlgorithmConformance):
    def make(self):
        return ProgressiveResizing(delay_fraction=0.2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Look(hocket.Callback):
    def __init__(self):
        self.widths, self.logged, self.batches = [], [], []

    def before_forward(self, state):
        self.widths.append(state.batch[0].shape[-1])
        self.batches.append(state.batch)
        self.logged.append({name.rpartition("/")[2]: value for name, value in state.logged.items()})


def run(algorithms, images, targets, batches, duration, **arguments):
    look = Look()
    trainer = hocket.Trainer(
        model=nn.Conv2d(1, 2, 1), loss=lambda outputs, targets: outputs.mean(), train_data=[(images, targets)] * batches,
        optimizer="sgd(lr=0.1)", duration=duration, algorithms=algorithms, callbacks=[look], device="cpu", checkpoints=False,
        **arguments,
    )  # fmt: skip
    trainer.fit()
    return look


@pytest.mark.parametrize(("batches", "duration"), [(10, "1ep"), (5, "2ep"), (10, "10ba")])
def test_the_schedule_advances_by_batch_whatever_the_unit(batches, duration):
    """The numbers of Composer's run in batches; there, scales of runs in epochs are a step function."""
    algorithm = ProgressiveResizing(initial_scale=0.5, delay_fraction=0.2, finetune_fraction=0.3, size_increment=2)
    look = run([algorithm], torch.rand(2, 1, 12, 8), torch.zeros(2), batches, duration)
    assert look.widths == [4, 4, 4, 4, 6, 6, 8, 8, 8, 8]
    scales = [logged["scale"] for logged in look.logged]
    assert scales == pytest.approx([0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1])
    assert [logged["width"] for logged in look.logged] == look.widths
    assert [logged["height"] for logged in look.logged] == [images.shape[-2] for images, _ in look.batches]


@pytest.mark.parametrize(("delay", "finetune"), [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_fractions_may_fill_the_run(delay, finetune):
    """Composer divides by zero."""
    ProgressiveResizing(delay_fraction=delay, finetune_fraction=finetune)
    scales = [scale_at(batch / 10, 0.5, finetune, delay) for batch in range(10)]
    assert scales == [0.5] * round(10 * delay) + [1.0] * round(10 * finetune)


def test_sizes_are_multiples_and_never_more_than_the_image():
    assert [resized(8, scale, 4) for scale in (0.1, 0.5, 0.74, 0.76, 0.99, 1.0)] == [4, 4, 4, 8, 8, 8]
    assert resized(7, 0.99, 4) == 7 and resized(3, 0.5, 4) == 3 and resized(7, 1.0, 4) == 7


def test_resizing_takes_the_nearest_pixels_as_interpolate_does():
    images = torch.rand(2, 3, 16, 12)
    expected = F.interpolate(images, size=(8, 6), mode="nearest")
    assert resize_batch(images, scale=0.5).equal(expected)
    assert resize_batch((images * 255).to(torch.uint8), scale=0.5).equal((expected * 255).to(torch.uint8))


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_masks_follow_their_images(mode):
    images = torch.rand(3, 2, 16, 12)
    masks = (images[:, 0] * 1000).long()
    small, less = resize_batch(images, masks, 0.5, mode=mode, generator=seeded(1))
    assert small.shape == (3, 2, 8, 6) and less.equal((small[:, 0] * 1000).long())
    assert resize_batch(images, masks, 0.5, mode=mode, resize_targets=False)[1] is masks
    labels = torch.arange(3)
    assert resize_batch(images, labels, 0.5, mode=mode)[1] is labels


def test_crops_are_parts_of_the_image_at_all_places():
    plane = torch.arange(16.0).view(1, 1, 4, 4)
    corners = {
        resize_batch(plane, scale=0.75, mode="crop", generator=seeded(seed))[0, 0, 0, 0].item() for seed in range(40)
    }
    assert corners == {0.0, 1.0, 4.0, 5.0}


def test_a_full_scale_returns_the_same_objects():
    images, masks = torch.rand(2, 1, 4, 4), torch.zeros(2, 4, 4)
    small, same = resize_batch(images, masks, 1.0)
    assert small is images and same is masks


def test_acts_before_what_drops_or_hides_pixels():
    """ColOut takes 15 % of the small images, and CutOut's squares have half of what remains."""
    images = torch.ones(2, 1, 40, 40)
    look = run([CutOut(), ColOut(), ProgressiveResizing(delay_fraction=0.8)], images, torch.zeros(2), 1, "1ep")
    assert look.widths == [17]  # 0.85 of 20


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="add up to at most 1"):
        ProgressiveResizing(delay_fraction=0.6, finetune_fraction=0.5)
    with pytest.raises(ValueError, match="initial_scale"):
        ProgressiveResizing(initial_scale=0)
    with pytest.raises(ValueError, match="mode"):
        ProgressiveResizing(mode="shrink")
    with pytest.raises(ValueError, match="size_increment"):
        ProgressiveResizing(size_increment=0)
    with pytest.raises(ValueError, match="as high and wide"):
        resize_batch(torch.rand(2, 1, 4, 4), torch.zeros(2), resize_targets=True)
    with pytest.raises(ValueError, match="scale is 0"):
        resize_batch(torch.rand(2, 1, 4, 4), scale=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"initial_scale": 1.0}, "images are full from the beginning"),
        ({"finetune_fraction": 1.0, "delay_fraction": 0.0}, "images are full from the beginning"),
        ({"size_increment": 8}, "size_increment=8 rounds all sizes up"),
    ],
)
def test_images_that_are_never_smaller_are_said(settings, told):
    images, targets = torch.rand(4, 1, 8, 8), torch.arange(4)
    with pytest.warns(hocket.NoEffectWarning, match=f"progressive-resizing has no effect: {told}"):
        run([ProgressiveResizing(**settings)], images, targets, 2, "2ep")


@pytest.mark.parametrize("settings", [{}, {"size_increment": 6}, {"delay_fraction": 0.0, "finetune_fraction": 0.5}])
def test_images_that_are_smaller_once_are_not_warned_of(settings, recwarn):
    run([ProgressiveResizing(**settings)], torch.rand(4, 1, 8, 8), torch.arange(4), 2, "2ep")
    assert not [each for each in recwarn if issubclass(each.category, hocket.NoEffectWarning)]
