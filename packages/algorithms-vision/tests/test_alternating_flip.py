"""Alternating flip against its definition: each image both ways in every two epochs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit import AlgorithmConformance
from hocket_testkit.reference import labelled_images
from hocket_vision import AlternatingFlip
from hocket_vision.alternating_flip import _FlipSample, flip_choices
from hocket_vision.functional import alternating_flip


class TestAlternatingFlip(AlgorithmConformance):
    def make(self):
        return AlternatingFlip()

    def data(self):
        images, labels = (torch.cat(parts) for parts in zip(*labelled_images(), strict=True))
        return DataLoader(TensorDataset(images, labels), 8)


def test_choices_alternate_from_a_fair_beginning():
    indices = torch.arange(20_000)
    first = flip_choices(indices, 0, seed=3)
    assert abs(first.float().mean() - 0.5) < 0.02
    for lag in (1, 2, 3, 128):  # neighbours are independent
        assert abs((first[lag:] == first[:-lag]).float().mean() - 0.5) < 0.02
    assert abs((first == flip_choices(indices, 0, seed=4)).float().mean() - 0.5) < 0.02
    for epoch in range(1, 5):
        assert flip_choices(indices, epoch, seed=3).equal(first ^ bool(epoch % 2))
    assert all(bool(flip_choices(torch.tensor(i), 0, seed=3)) == bool(first[i]) for i in range(50))
    assert flip_choices(torch.arange(4), 0, seed=2**64 - 1).dtype is torch.bool


def test_flips_mirror_the_chosen_images_and_keep_the_format():
    images = torch.rand(8, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    flipped = alternating_flip(images, torch.arange(8), epoch=1, seed=5)
    for image, new, chosen in zip(images, flipped, flip_choices(torch.arange(8), 1, 5), strict=True):
        assert new.equal(image.flip(-1) if chosen else image)
    assert flipped.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="one index"):
        alternating_flip(images, torch.arange(7), 0)


def epochs_of(data, algorithm, **arguments):
    """Return the image of each label, in each of four epochs."""
    seen: list[dict[int, torch.Tensor]] = []

    class Look(hocket.Callback):
        def epoch_start(self, state):
            seen.append({})

        def before_forward(self, state):
            seen[-1].update(zip(state.batch[1].tolist(), state.batch[0].clone(), strict=True))

    hocket.Trainer(
        model=nn.Sequential(nn.Flatten(), nn.Linear(6, 12)), loss=nn.functional.cross_entropy, train_data=data,
        optimizer="sgd(lr=0.1)",
        duration="4ep", seed=1, algorithms=[algorithm], callbacks=[Look()], device="cpu", checkpoints=False, **arguments,
    ).fit()  # fmt: skip
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_seen_both_ways_whatever_its_place(workers):
    images = torch.arange(72.0).view(12, 1, 2, 3)
    data = DataLoader(TensorDataset(images, torch.arange(12)), 5, shuffle=True, num_workers=workers)
    seen = epochs_of(data, AlternatingFlip())
    assert any(seen[0][i].equal(images[i]) for i in range(12)) and any(
        not seen[0][i].equal(images[i]) for i in range(12)
    )
    for first, second in pairwise(seen):
        for i in range(12):
            assert sorted([first[i].flatten()[0], second[i].flatten()[0]]) == [images[i, 0, 0, 0], images[i, 0, 0, 2]]


def test_batches_with_indices():
    images = torch.arange(72.0).view(12, 1, 2, 3)
    data = [(images[at], at, at) for at in torch.arange(12).split(5)]
    seen = epochs_of(data, AlternatingFlip(index_key=2), inputs=0, targets=1)
    for i in range(12):
        assert seen[0][i].equal(seen[1][i].flip(-1)) and seen[0][i].equal(seen[2][i])


def test_masks_and_pil_images():
    image, mask = torch.rand(3, 4, 6), torch.arange(24).view(4, 6)
    index = next(i for i in range(99) if flip_choices(torch.tensor(i), 0, 0))
    flip = _FlipSample("image", "mask")
    flipped = flip({"image": image, "mask": mask}, (0, 0, index))
    assert flipped["image"].equal(image.flip(-1)) and flipped["mask"].equal(mask.flip(-1))
    same = {"image": image, "mask": mask}
    assert flip(same, (0, 1, index)) is same
    picture = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    assert np.array_equal(np.asarray(flip(picture, (0, 0, index))), np.asarray(picture)[:, ::-1])


def test_data_without_indices_is_refused():
    with pytest.raises(TypeError, match="DataLoader"):
        epochs_of([(torch.rand(4, 1, 2, 3), torch.arange(4))], AlternatingFlip())
