"""AugMix against the formula of arXiv 1912.02781; its operations are tested in test_operations.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import functional as F

import hocket
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_testkit.reference import labelled_images
from hocket_vision import AugMix
from hocket_vision.augmix import augmix, dirichlet, mix_chains
from hocket_vision.image_operations import AUGMENTATION_SETS, Layer, operate


class TestAugMix(AlgorithmConformance):
    heavy = {"torchvision"}

    def make(self):
        return AugMix()

    def data(self):
        batches = labelled_images()
        images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
        return DataLoader(TensorDataset(images, labels), 8)


class TestBatchedAugMix(AlgorithmConformance):
    heavy = {"torchvision"}

    def make(self):
        return AugMix(batch=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photo(height: int = 12, width: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=seeded(9))


def test_mixture_is_the_weighted_sum_of_the_formula():
    images = torch.rand(2, 3, 5, 4, generator=seeded())
    chains = torch.rand(3, 2, 3, 5, 4, generator=seeded(1))
    weights, m = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]).t(), torch.tensor([0.6, 0.25])
    out = mix_chains(images, chains, weights, m)
    for i, (w, share) in enumerate(zip(weights.t().tolist(), m.tolist(), strict=True)):
        expected = (1 - share) * images[i] + share * (w[0] * chains[0, i] + w[1] * chains[1, i] + w[2] * chains[2, i])
        torch.testing.assert_close(out[i], expected)


def test_integer_images_are_rounded():
    image = photo()[None]
    chains = torch.stack([255 - image, image])
    pixels = image.double()
    expected = (0.6 * pixels + 0.4 * (0.25 * (255 - pixels) + 0.75 * pixels)).round().to(torch.uint8)
    out = mix_chains(image, chains, torch.tensor([[0.25], [0.75]]), torch.tensor([0.4]))
    assert (out.int() - expected.int()).abs().max() <= 1 and (out == expected).float().mean() > 0.99
    unchanged = mix_chains(image, image.repeat(3, 1, 1, 1, 1), torch.tensor([[0.3], [0.3], [0.4]]), torch.tensor([0.7]))
    assert unchanged.equal(image)  # truncation would darken it by one


def test_it_is_the_algorithm_of_the_paper(monkeypatch):
    """Recomputed for each image of a batch from the recorded draws: ops in a row per chain, then the weighted sum."""
    recorded: list[tuple[list[str | None], list[float]]] = []
    mixed = {}

    def record(images, layer):
        recorded.append(layer)
        operate(images, layer)

    def mix(images, chains, weights, m):
        mixed.update(weights=weights, m=m)
        return mix_chains(images, chains, weights, m)

    monkeypatch.setattr("hocket_vision.augmix.operate", record)
    monkeypatch.setattr("hocket_vision.augmix.mix_chains", mix)
    images = torch.rand(5, 3, 12, 16, generator=seeded())
    out = augmix(images, width=2, generator=seeded(3))
    depths = set()
    for i in range(5):
        total = (1 - mixed["m"][i]) * images[i]
        for chain in range(2):
            version, steps = images[i : i + 1].clone(), 0
            for layer in recorded:
                name, strength = layer.names[5 * chain + i], layer.strengths[5 * chain + i]
                operate(version, Layer([name], [strength]))
                steps += name is not None
            depths.add(steps)
            total = total + mixed["m"][i] * mixed["weights"][chain, i] * version[0]
        torch.testing.assert_close(out[i], total.float(), atol=1e-4, rtol=0)
    assert depths == {1, 2, 3}


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_weights_are_dirichlet_and_shares_beta(alpha):
    weights = dirichlet(alpha, 3, 4000, seeded()).t().numpy()
    np.testing.assert_allclose(weights.sum(1), 1)
    variance = (1 / 3) * (2 / 3) / (3 * alpha + 1)
    np.testing.assert_allclose(weights.mean(0), 1 / 3, atol=6 * math.sqrt(variance / 4000))
    np.testing.assert_allclose(weights.var(0), variance, rtol=0.15)
    shares = dirichlet(alpha, 2, 4000, seeded())[0].numpy()
    np.testing.assert_allclose(shares.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.15)


def test_the_default_set_is_the_papers():
    """Section 3: without contrast, color, brightness, sharpness and Cutout, which ImageNet-C has too."""
    geometry = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}
    assert set(AUGMENTATION_SETS["safe"]) == {"autocontrast", "equalize", "posterize", "solarize", *geometry}
    images = photo(32, 32).expand(16, 3, 32, 32)
    safe, everything = (augmix(images, augmentation_set=name, generator=seeded()) for name in ("safe", "all"))
    assert augmix(images, generator=seeded()).equal(safe) and not safe.equal(everything)
    assert AugMix().augmentation.settings["augmentation_set"] == "safe"


@pytest.mark.parametrize("augmentation_set", ["all", "safe", "original"])
@pytest.mark.parametrize("channels", [1, 3])
def test_kind_size_and_dtype_stay(augmentation_set, channels):
    image = photo(9, 7, channels)
    for seed in range(4):
        out = augmix(image, 5, augmentation_set=augmentation_set, generator=seeded(seed))
        assert (out.shape, out.dtype) == (image.shape, torch.uint8)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            real = augmix(image.to(dtype) / 255, 5, augmentation_set=augmentation_set, generator=seeded(seed))
            assert (real.shape, real.dtype) == (image.shape, dtype) and real.min() >= 0 and real.max() <= 1
        pil = augmix(F.to_pil_image(image), 5, augmentation_set=augmentation_set, generator=seeded(seed))
        assert pil.mode == ("L" if channels == 1 else "RGB") and pil.size == (7, 9)
        assert F.pil_to_tensor(pil).equal(out)
        assert augmix(image[None], 5, augmentation_set=augmentation_set, generator=seeded(seed))[0].equal(out)


def test_floating_point_images_are_augmented_like_integers():
    images = torch.stack([photo() for _ in range(8)])
    for seed in range(5):
        integers = augmix(images, generator=seeded(seed))
        real = augmix(images / 255, generator=seeded(seed)) * 255
        assert (integers - real).abs().mean() < 6  # posterize scales its levels otherwise


def test_channels_last_batches_remain_so():
    images = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    out = augmix(images, generator=seeded())
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.equal(augmix(images.contiguous(), generator=seeded()))


def test_tv_tensors_and_empty_batches_remain_what_they_are():
    from torchvision import tv_tensors

    assert isinstance(augmix(tv_tensors.Image(photo())), tv_tensors.Image)
    assert augmix(torch.rand(0, 3, 8, 8)).shape == (0, 3, 8, 8)


def test_each_image_of_a_batch_has_its_own_draws():
    same = photo().expand(6, 3, 12, 16)
    assert len({image.numpy().tobytes() for image in augmix(same, generator=seeded())}) == 6


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
    layers: list[Layer] = []
    monkeypatch.setattr("hocket_vision.augmix.operate", lambda images, layer: layers.append(layer))
    augmix(photo(), depth=2, width=4)
    assert [len(layer.names) for layer in layers] == [4, 4] and None not in layers[0].names + layers[1].names


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
        ({"augmentation_set": "some"}, "augmentation_set must be one of all, safe, original, tone"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        augmix(photo(), **settings)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.zeros(2, 2, 3, 4, 4), ValueError, "shape"),
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


def fit(images: torch.Tensor) -> None:
    hocket.Trainer(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)), loss=torch.nn.functional.cross_entropy,
        train_data=[(images, torch.arange(len(images)))], optimizer="sgd(lr=0.1)", duration="1ba",
        algorithms=[AugMix(batch=True)], device="cpu",
    ).fit()  # fmt: skip


def test_normalized_batches_and_vectors_are_refused_in_a_run():
    with pytest.raises(ValueError, match="before normalization"):
        fit(torch.randn(4, 3, 8, 8))
    with pytest.raises(ValueError, match=r"\(B, C, H, W\).*input_key"):
        fit(torch.rand(4, 16))
    with pytest.raises(TypeError, match="int64"):
        fit(torch.ones(4, 3, 8, 8, dtype=torch.int64))


def test_ranks_draw_their_own_numbers():
    pytest.importorskip("hocket_strategies")
    seen = run_ranks(_first_batch, 2)
    assert not seen[0].equal(seen[1])


def _first_batch(rank: int) -> torch.Tensor:
    """The augmented batch of a rank, where all images are the same."""
    seen: list[torch.Tensor] = []

    class Keep(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            seen.append(state.batch[0].clone())

    hocket.Trainer(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)), loss=torch.nn.functional.cross_entropy,
        train_data=DataLoader(TensorDataset(photo(8, 8).float().div(255).expand(8, 3, 8, 8), torch.zeros(8).long()), 4),
        optimizer="sgd(lr=0.1)", duration="1ba", algorithms=[AugMix(batch=True)], callbacks=[Keep()], device="cpu",
        strategy="ddp", seed=1,
    ).fit()  # fmt: skip
    return seen[0]
