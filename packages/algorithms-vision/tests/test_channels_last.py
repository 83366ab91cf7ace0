"""Channels-last: only the memory format changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.surgery import update_optimizer
from hocket.testkit import AlgorithmConformance
from hocket_vision import BlurConv2d, ChannelsLast, small_resnet
from hocket_vision.functional import channels_last, colout, resize_batch


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


def test_colout_and_resizing_keep_the_format():
    images = torch.rand(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert is_last(colout(images)) and is_last(resize_batch(images, scale=0.5))


def test_weights_of_five_dimensions_are_left_alone():
    model, changed = channels_last(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv3d(2, 4, 3)))
    assert len(changed) == 1 and model[1].weight.is_contiguous()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
