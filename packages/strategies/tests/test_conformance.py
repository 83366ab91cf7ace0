"""Every strategy and precision of this package passes the suites that authors of plug-ins inherit."""

from hocket.testkit import PrecisionConformance, StrategyConformance
from hocket_strategies import DDP, FP64, FSDP, TensorParallel


class TestDDP(StrategyConformance):
    def make(self):
        return DDP()


class TestFSDP(StrategyConformance):
    def make(self):
        return FSDP(wrap=["Linear"])


class TestFSDPOn4(TestFSDP):
    world_size = 4


class TestHybridSharding(StrategyConformance):
    world_size = 4

    def make(self):
        return FSDP(replicate=2, wrap=["Linear"])


class TestTensorParallel(StrategyConformance):
    def make(self):
        return TensorParallel(plan={"0": "colwise", "2": "rowwise"})


class TestTensorParallelOn4(TestTensorParallel):
    world_size = 4


class TestShardedTensorParallel(StrategyConformance):
    world_size = 4

    def make(self):
        return TensorParallel(shard=2, tensor=2, plan={"0": "colwise", "2": "rowwise"})


class TestFP64(PrecisionConformance):
    def make(self):
        return FP64()
