"""Every strategy and precision of this package passes the suites that authors of plug-ins inherit."""

from hocket.testkit import PrecisionConformance, StrategyConformance
from hocket_strategies import DDP, FP64


class TestDDP(StrategyConformance):
    def make(self):
        return DDP()


class TestFP64(PrecisionConformance):
    def make(self):
        return FP64()
