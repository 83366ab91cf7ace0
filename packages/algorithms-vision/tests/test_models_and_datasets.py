from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hocket_vision import digits, small_resnet


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3), (11, 1)])
def test_small_resnet_maps_images_to_logits(size, channels):
    model = small_resnet(7, channels, blocks_per_stage=2)
    assert model(torch.rand(2, channels, size, size)).shape == (2, 7)
    features = model[:-3](torch.rand(2, channels, size, size))
    assert features.shape == (2, 64, -(-size // 4), -(-size // 4))


def test_small_resnet_is_16_32_64_with_the_parameters_it_says():
    model = small_resnet()
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert sorted({conv.out_channels for conv in convs}) == [16, 32, 64]
    by_hand = 9 * (16 + 2 * 16**2 + 16 * 32 + 32**2 + 32 * 64 + 64**2) + 16 * 32 + 32 * 64  # convolutions
    by_hand += 2 * (3 * 16 + 3 * 32 + 3 * 64) + 650  # norms, classifier
    assert sum(p.numel() for p in model.parameters()) == by_hand


def test_digits_are_split_into_four_fifths_and_a_stratified_fifth():
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    train, test = digits("train").dataset.tensors, digits("test").dataset.tensors
    assert len(train[0]) == 1437 and len(test[0]) == 360
    images = torch.cat([train[0], test[0]])
    assert images.dtype == torch.float32 and images.shape[1:] == (1, 8, 8) and (images.min(), images.max()) == (0, 1)
    everything = sorted(map(tuple, (images.flatten(1) * 16).int().tolist()))
    assert everything == sorted(map(tuple, load_digits().data.astype(int).tolist()))
    share = torch.bincount(test[1]) / torch.bincount(torch.cat([train[1], test[1]]))
    assert (share - 0.2).abs().max() < 0.01


def test_the_seed_orders_the_training_images_and_moves_none_to_the_test():
    pytest.importorskip("sklearn")
    first, again, other = (torch.cat([y for _, y in digits("train", seed=seed)]) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    assert digits("test", seed=1).dataset.tensors[0].equal(digits("test", seed=2).dataset.tensors[0])
    assert torch.cat([y for _, y in digits("test")]).equal(digits("test").dataset.tensors[1])


def test_digits_can_be_scaled_up():
    pytest.importorskip("sklearn")
    images, _ = next(iter(digits("test", batch_size=5, size=32)))
    small, _ = next(iter(digits("test", batch_size=5)))
    assert images.shape == (5, 1, 32, 32)
    places = (np.arange(32) + 0.5) / 4 - 0.5  # of the new pixels' centres, among those of the old pixels

    def along(axis: int, plane: np.ndarray) -> np.ndarray:
        return np.apply_along_axis(lambda line: np.interp(places, np.arange(8), line), axis, plane)

    np.testing.assert_allclose(images[3, 0], along(0, along(1, small[3, 0].numpy())), atol=1e-6)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'train' or 'test'"):
        digits("validation")


def test_without_scikit_learn_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'scikit-learn>="):
        digits()


def test_the_model_learns_the_digits():
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    model = small_resnet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(3):
        for images, labels in digits("train"):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float().mean() for images, labels in digits("test", 360)]
    assert hits[0] > 0.9


@pytest.mark.long
def test_names_are_listed_and_nothing_heavy_is_imported_for_them():
    code = (
        "import sys, hocket_vision; assert 'BlurPool' in dir(hocket_vision); hocket_vision.small_resnet; "
        "print([name for name in ('torchvision', 'sklearn', 'PIL') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    import hocket_vision

    assert all(getattr(hocket_vision, name) is not None for name in hocket_vision.__all__)
    with pytest.raises(AttributeError, match=r"it has .*AugMix"):
        hocket_vision.blur_pool  # noqa: B018
