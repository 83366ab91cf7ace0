"""Every algorithm of this package passes the suite that authors of plug-ins inherit."""

from hocket_general import EMA, SAM, GradientClipping, LabelSmoothing
from hocket_testkit import AlgorithmConformance


class TestLabelSmoothing(AlgorithmConformance):
    def make(self):
        return LabelSmoothing(smoothing=0.2)


class TestEMA(AlgorithmConformance):
    def make(self):
        return EMA(half_life="2ba")


class TestSAM(AlgorithmConformance):
    def make(self):
        return SAM(rho=0.1)


class TestGradientClipping(AlgorithmConformance):
    def make(self):
        return GradientClipping("norm", 0.1)
