"""Every strategy and precision of this package passes the suites that authors of plug-ins inherit."""

import pytest
from torch import nn

from hocket_strategies import DDP, FP8, FP16, FP64, FSDP, INT8, TF32, BF16True, FP16True, TensorParallel
from hocket_testkit import PrecisionConformance, StrategyConformance


class TestDDP(StrategyConformance):
    def make(self):
        return DDP()


class TestFSDP(StrategyConformance):
    def make(self):
        return FSDP(wrap=["Linear"])


@pytest.mark.long
class TestFSDPOn4(TestFSDP):
    world_size = 4


@pytest.mark.long
class TestHybridSharding(StrategyConformance):
    world_size = 4

    def make(self):
        return FSDP(replicate=2, wrap=["Linear"])


class TestTensorParallel(StrategyConformance):
    exempt = {"test_trains_a_task_of_two_steps": "the plan has other names"}
    options = {}
    plan = {"0": "colwise", "2": "rowwise"}

    def make(self):
        return TensorParallel(plan=self.plan, **self.options)

    def test_trains_a_task_of_two_steps(self):
        self.plan = {f"{part}.network.{name}": how for part in ("first", "second") for name, how in self.plan.items()}
        super().test_trains_a_task_of_two_steps()


@pytest.mark.long
class TestTensorParallelOn4(TestTensorParallel):
    world_size = 4


@pytest.mark.long
class TestShardedTensorParallel(TestTensorParallel):
    world_size = 4
    options = {"shard": 2, "tensor": 2}


class TestFP64(PrecisionConformance):
    def make(self):
        return FP64()


class TestTF32(PrecisionConformance):
    def make(self):
        return TF32()


class TestFP16(PrecisionConformance):
    gradient_tolerance = 0.03

    def make(self):
        return FP16()


class TestFP16WithOverflows(PrecisionConformance):
    """The scale grows so fast that steps are skipped in every run."""

    gradient_tolerance = 0.03

    def make(self):
        return FP16(init_scale=2.0**16, growth_interval=2)


class TestBF16True(PrecisionConformance):
    gradient_tolerance = 0.05

    def make(self):
        return BF16True()


class TestFP16True(PrecisionConformance):
    gradient_tolerance = 0.03

    def make(self):
        return FP16True()


class TestFP8(PrecisionConformance):
    gradient_tolerance = 0.2

    def make(self):
        pytest.importorskip("torchao")
        return FP8()

    def model(self):
        return _wide()


class TestINT8(PrecisionConformance):
    """Its evaluations are less exact than its gradients, which are those of fp32."""

    gradient_tolerance = 1e-2

    def make(self):
        pytest.importorskip("torchao")
        return INT8()


def _wide() -> nn.Module:
    """Two linear layers whose sizes are multiples of 16, and normalisations."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=4, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 16),
    )
