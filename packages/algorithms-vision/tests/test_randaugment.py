"""RandAugment against figure 2 of arXiv 1909.13719; its operations are tested in test_operations.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import functional as F

import hocket
from hocket_testkit import AlgorithmConformance
from hocket_testkit.reference import labelled_images
from hocket_vision import AugMix, RandAugment
from hocket_vision.image_operations import AUGMENTATION_SETS, OPERATIONS, Draw, Layer, operate
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
        ({"augmentation_set": "some"}, "augmentation_set must be one of all, safe, original, tone"),
        ({"magnitude": "linear"}, "'constant' or 'random'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        randaugment(photos(), **settings)
    with pytest.raises(ValueError, match=message):
        RandAugment(**settings)


MASKS = torch.arange(6 * 12 * 16).view(6, 12, 16) % 3


class Pictures(torch.utils.data.Dataset):
    """Samples whose mask is in a dict of targets."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"image": photos()[index] / 255, "target": {"label": index, "mask": MASKS[index]}}


def trained(algorithm, data, **settings):
    model = nn.Conv2d(3, 3, 1)
    trainer = hocket.Trainer(
        model, data, loss=nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu", seed=1,
        algorithms=[algorithm], loggers=[], **settings,
    )  # fmt: skip
    trainer.fit()
    return model


@pytest.mark.parametrize("kind", [RandAugment, AugMix])
@pytest.mark.parametrize("batch", [False, True])
def test_masks_are_refused_where_pixels_move(kind, batch):
    masks = TensorDataset(photos() / 255, MASKS)
    moves = r"rotate, shear_x, shear_y, translate_x, translate_y\).*\(3, 12, 16\).*'augmentation_set': 'tone'"
    with pytest.raises(ValueError, match=moves):
        trained(kind(batch=batch), DataLoader(masks, 3))
    with pytest.raises(ValueError, match=f"{{'{kind.__name__.lower()}': "):
        trained(kind(batch=batch), DataLoader(Pictures(), 3), inputs="image", targets="target")
    trained(kind(augmentation_set="tone", batch=batch), DataLoader(masks, 3))


@pytest.mark.filterwarnings("ignore:.* has no effect")
def test_masks_are_refused_before_the_first_augmented_batch_and_in_ragged_lists():
    with pytest.raises(ValueError, match="tone"):
        trained(RandAugment(batch=True, start="1000ba"), [(photos() / 255, MASKS)])

    class Ragged(hocket.Task):
        def __init__(self):
            super().__init__()
            self.model = nn.Conv2d(3, 3, 1)

        def forward(self, batch):
            return [self.model(image) for image in batch[0]]

        def loss(self, outputs, batch):
            return sum(map(torch.Tensor.sum, outputs)), len(outputs)

    samples = [(photos()[index, :, : 12 - index] / 255, MASKS[index, : 12 - index]) for index in range(2)]
    loader = DataLoader(samples, 2, collate_fn=lambda some: tuple(map(list, zip(*some, strict=True))))
    with pytest.raises(ValueError, match=r"shape \(3, 12, 16\), targets \(12, 16\)"):
        hocket.Trainer(
            Ragged(), loader, duration="1ep", optimizer="sgd(lr=0.1)", device="cpu", algorithms=[RandAugment()]
        ).fit()


def test_tones_leave_pixels_where_they_are():
    """What one pixel becomes depends on where it is only through sharpness; a picture of two tones keeps its edges."""
    image = torch.zeros(1, 3, 12, 16, dtype=torch.uint8)
    image[..., 4:9, 5:11] = 200
    for seed in range(40):
        out = randaugment(image, 9, augmentation_set="tone", generator=seeded(seed))[0]
        inside, outside = out[:, 5:8, 6:10], out[:, :3]
        assert (inside == inside[:, :1, :1]).all() and (outside == outside[:, :1, :1]).all()


def test_data_without_a_loader_is_refused_with_a_word_about_whole_batches():
    with pytest.raises(TypeError, match=r"training data is list.*batch=True"):
        trained(RandAugment(), [(photos() / 255, MASKS)])
