"""Every algorithm of this package passes the suite that authors of plug-ins inherit."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from hocket.testkit import AlgorithmConformance
from hocket.testkit.reference import labelled_images
from hocket_vision import BlurPool, ColOut


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
