"""The suites of the algorithms that compress."""

from __future__ import annotations

import pytest
from torch import nn

from hocket_testkit import AlgorithmConformance
from hocket_tools import ChannelPruning, Pruning, QuantizationAwareTraining


class TestPruning(AlgorithmConformance):
    def make(self):
        return Pruning(amount=0.5, stop="4ba", start="0ba", interval="1ba")


@pytest.mark.filterwarnings("ignore:channel-pruning removes no output channel of")  # a task may have other networks
class TestChannelPruning(AlgorithmConformance):
    exempt = {"test_keeps_no_tensors": "torch-pruning keeps the last layer of the copy that it pruned"}

    def make(self):
        pytest.importorskip("torch_pruning")
        return ChannelPruning(example=(2, 3, 8, 8))


class TestQuantizationAwareTraining(AlgorithmConformance):
    heavy = {"torchao"}
    exempt = {"test_works_with_microbatches": "ranges of inputs move with every forward pass"}

    def make(self):
        pytest.importorskip("torchao", minversion="0.18")
        return QuantizationAwareTraining()

    def model(self):
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
