"""Every algorithm of this package passes the suite that authors of plug-ins inherit."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hocket_vision
from hocket_testkit import AlgorithmConformance
from hocket_testkit.reference import labelled_images
from hocket_vision import BlurPool, ColOut, functional


def loader():
    """The reference images one by one, for algorithms that act where samples are loaded."""
    batches = labelled_images()
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    return DataLoader(TensorDataset(images, labels), 8)


class TestBlurPool(AlgorithmConformance):
    def make(self):
        return BlurPool(min_channels=16)


class TestColOut(AlgorithmConformance):
    def make(self):
        return ColOut(p_row=0.25, p_col=0.25)


class TestColOutPerSample(AlgorithmConformance):
    def make(self):
        return ColOut(batch=False)

    def data(self):
        # One image to a batch: images that lost different rows still have one size, but default collation need not know.
        return loader()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("AugMix", "augmix"),
        ("BlurPool", "blurpool"),
        ("ColOut", "colout"),
        ("CutMix", "cutmix"),
        ("CutOut", "cutout"),
        ("MixUp", "mixup"),
        ("ProgressiveResizing", "resize_batch"),
        ("RandAugment", "randaugment"),
        ("SqueezeExcite", "squeeze_excite"),
        ("StochasticDepth", "stochastic_depth"),
    ],
)
def test_class_and_function_have_one_set_of_defaults(name, function):
    of_class, of_function = (
        inspect.signature(each).parameters for each in (getattr(hocket_vision, name), getattr(functional, function))
    )
    common = of_class.keys() & of_function.keys() - {"size_increment"}  # one batch has the size that was asked for
    assert common
    assert {each: of_class[each].default for each in common} == {each: of_function[each].default for each in common}
