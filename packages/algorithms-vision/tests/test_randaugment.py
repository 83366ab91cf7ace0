"""RandAugment against figure 2 of arXiv 1909.13719; its operations are tested in test_operations.py."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import functional as F

from hocket.testkit import AlgorithmConformance
from hocket.testkit.reference import labelled_images
from hocket_vision import RandAugment
from hocket_vision.operations import AUGMENTATION_SETS, OPERATIONS, Draw, Layer, operate
from hocket_vision.randaugment import randaugment


class TestRandAugment(AlgorithmConformance):
    heavy = {"torchvision"}

    def make(self):
        return RandAugment(severity=3)

    def data(self):
        batches = labelled_images()
        images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
        return DataLoader(TensorDataset(images, labels), 8)


class TestBatchedRandAugment(AlgorithmConformance):
    heavy = {"torchvision"}

    def make(self):
        return RandAugment(severity=3, batch=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(count: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 12, 16), dtype=torch.uint8, generator=seeded(9))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_operations_follow_each_other_at_one_magnitude(depth, monkeypatch):
    layers: list[Layer] = []

    def record(images, layer):
        layers.append(layer)
        operate(images, layer)

    monkeypatch.setattr("hocket_vision.randaugment.operate", record)
    images = photos(40)
    out = randaugment(images, 7, depth, generator=seeded())
    expected = images.clone()
    for layer in layers:
        operate(expected, layer)
        for name, strength in zip(*layer, strict=True):
            if name is not None:
                assert name in AUGMENTATION_SETS["original"]
                both = [OPERATIONS[name].strength(Draw(1.0, up, 7, 12, 16)) for up in (True, False)]
                assert strength in both, "the paper's M, whose sign alone is random"
    assert len(layers) == depth and out.equal(expected)
    assert any(None in layer.names for layer in layers), "the identity is one of the paper's operations"


def test_a_random_magnitude_is_composers(monkeypatch):
    layers: list[Layer] = []
    monkeypatch.setattr("hocket_vision.randaugment.operate", lambda images, layer: layers.append(layer))
    randaugment(photos(2000), 9, 1, "all", "random", generator=seeded())
    slopes = [abs(s) for name, s in zip(*layers[0], strict=True) if name == "shear_x"]
    assert min(slopes) < 0.03 and 0.25 < max(slopes) < 0.27 and abs(sum(slopes) / len(slopes) - 0.1365) < 0.03


def test_pil_images_tensors_and_batches_of_one_are_the_same():
    for seed in range(10):
        (image,) = photos(1)
        out = randaugment(image, generator=seeded(seed))
        assert randaugment(image[None], generator=seeded(seed))[0].equal(out)
        assert F.pil_to_tensor(randaugment(F.to_pil_image(image), generator=seeded(seed))).equal(out)


def test_input_is_not_changed_and_the_generator_decides_alone():
    images, before = photos(), torch.get_rng_state()
    copy = images.clone()
    first, again, other = (randaugment(images, generator=seeded(seed)) for seed in (1, 1, 2))
    assert images.equal(copy) and first.equal(again) and not first.equal(other)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"severity": 10.5}, "severity must be between 0 and 10"),
        ({"depth": 0}, "depth"),
        ({"augmentation_set": "some"}, "augmentation_set must be one of all, safe, original"),
        ({"magnitude": "linear"}, "'constant' or 'random'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        randaugment(photos(), **settings)
    with pytest.raises(ValueError, match=message):
        RandAugment(**settings)
