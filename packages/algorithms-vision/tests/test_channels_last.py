"""Channels-last: only the memory format changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hocket
from hocket.surgery import update_optimizer
from hocket_testkit import AlgorithmConformance
from hocket_vision import BlurConv2d, ChannelsLast, functional, small_resnet
from hocket_vision.functional import channels_last
from hocket_vision.models import ResidualBlock


class TestChannelsLast(AlgorithmConformance):
    def make(self):
        return ChannelsLast()


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_parameters_stay_the_same_objects_with_the_same_values():
    model = small_resnet(in_channels=3)
    parameters, values = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    same, changed = channels_last(model)
    assert same is model and all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    weights = [f"{each.name}.weight" for each in changed]
    assert weights == [name for name, each in model.named_parameters() if each.dim() == 4]
    assert all(each.new is each.old is model.get_submodule(each.name) for each in changed)
    assert is_last(model.stem[0].weight)
    assert all(values[name].equal(value) for name, value in model.state_dict().items())


def test_converts_images_of_training_and_evaluation_and_what_other_surgery_made():
    formats = []

    class Look(hocket.Callback):
        def before_forward(self, state):
            formats.append(is_last(state.batch[0]))

        def eval_before_forward(self, state):
            formats.append(is_last(state.batch[0]))

    model, data = small_resnet(in_channels=3), [(torch.rand(4, 3, 8, 8), torch.arange(4))]
    trainer = hocket.Trainer(
        model=model, loss=nn.CrossEntropyLoss(), train_data=data, eval_data=data, optimizer="sgd(lr=0.1)", duration="1ep",
        algorithms=["channels-last", "blurpool"], callbacks=[Look()], device="cpu", checkpoints=False,
    )  # fmt: skip
    trainer.fit()
    blurred = [module for module in model.modules() if isinstance(module, BlurConv2d) and module.kernel_size != (1, 1)]
    assert formats == [True, True] and blurred and all(is_last(module.weight) for module in blurred)
    assert data[0][0].is_contiguous()


def test_its_records_are_those_of_other_surgery():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(optimizer.param_groups[0]["params"])
    update_optimizer(optimizer, channels_last(model)[1])
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert ChannelsLast().touches(model) == ["0: Conv2d in channels-last format"]


def test_nothing_to_convert():
    with pytest.warns(hocket.NoEffectWarning, match="channels-last found nothing to convert in Linear"):
        assert channels_last(nn.Linear(3, 3))[1] == []


OF_BATCHES = {
    "alternating_flip": lambda images: functional.alternating_flip(images, torch.arange(len(images)), 0),
    "augmix": functional.augmix,
    "colout": functional.colout,
    "cutmix": functional.cutmix,
    "cutout": functional.cutout,
    "mixup": functional.mixup,
    "randaugment": functional.randaugment,
    "resize_batch": functional.resize_batch,
}
OF_MODELS = {
    "blurpool": functional.blurpool,
    "channels_last": functional.channels_last,
    "squeeze_excite": lambda model: functional.squeeze_excite(model, min_channels=8, latent_channels=4),
    "stochastic_depth": functional.stochastic_depth,
}


def in_memory(images: torch.Tensor, *order: int) -> torch.Tensor:
    """Images whose dimensions lie in memory in this order; by hand, as torch ignores strides where a size is 1."""
    strides, step = {}, 1
    for dim in reversed(order):
        strides[dim], step = step, step * images.shape[dim]
    copy = torch.empty(images.numel(), dtype=images.dtype)
    return copy.as_strided(images.shape, [strides[dim] for dim in sorted(order)]).copy_(images)


@pytest.mark.parametrize("name", functional.__all__)
@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (4, 1, 8, 8), (1, 3, 8, 8), (4, 3, 4, 1)])
def test_batches_keep_their_order_in_memory(name, shape):
    if name in OF_MODELS:
        return
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.uint8):
        pixels = torch.rand(shape, generator=random)
        pixels = pixels if dtype.is_floating_point else (255 * pixels).to(dtype)
        for order in ((0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 2, 1), (1, 2, 3, 0)):
            images = in_memory(pixels, *order)
            changed = OF_BATCHES[name](images)
            assert changed.stride() == in_memory(torch.empty(changed.shape), *order).stride(), (dtype, order)
        plain, view = (OF_BATCHES[name](each) for each in (pixels, pixels.repeat(1, 1, 1, 2)[..., : shape[3]]))
        assert plain.stride() == view.stride()  # a view of more images becomes dense


def test_a_mask_is_mixed_in_its_format_and_volumes_in_theirs():
    volumes = torch.rand(4, 3, 2, 8, 8).contiguous(memory_format=torch.channels_last_3d)
    mixed, targets = functional.mixup(volumes, volumes)
    assert mixed.stride() == targets.second.stride() == volumes.stride()
    expected = targets.share * volumes.double() + (1 - targets.share) * targets.second.double()
    torch.testing.assert_close(mixed, expected.float())
    rows = torch.rand(5, 4).t()
    assert functional.mixup(rows).stride() == rows.stride()


@pytest.mark.parametrize("name", OF_MODELS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_changed_models_keep_the_format_of_weights_and_images(name, format):
    def model():
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            ResidualBlock(16, 16),
            ResidualBlock(16, 32, 2),
        ]
        return nn.Sequential(*layers).to(memory_format=format)

    plain, changed = model(), model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hocket.NoEffectWarning)  # no block of the small model may be dropped
        OF_MODELS[name](changed)
    kept = torch.channels_last if name == "channels_last" else format
    assert all(each.is_contiguous(memory_format=kept) for each in changed.parameters() if each.dim() == 4)
    images = torch.rand(4, 8, 32, 32).contiguous(memory_format=kept)
    plain.to(memory_format=kept)
    for before, after in zip(plain, changed, strict=True):
        expected = before(images)
        assert after(images).stride() == expected.stride(), type(after)
        images = expected


def test_weights_of_five_dimensions_are_left_alone():
    model, changed = channels_last(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv3d(2, 4, 3)))
    assert len(changed) == 1 and model[1].weight.is_contiguous()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
