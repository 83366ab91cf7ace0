"""The built-in callbacks pass the suite that authors of plug-ins inherit."""

import pytest

from hocket_insight.callbacks.activation_monitor import ActivationMonitor
from hocket_insight.callbacks.early_stopping import EarlyStopping
from hocket_insight.callbacks.energy_monitor import EnergyMonitor
from hocket_insight.callbacks.gradient_monitor import GradientMonitor
from hocket_insight.callbacks.heartbeat import Heartbeat
from hocket_insight.callbacks.lr_monitor import LRMonitor
from hocket_insight.callbacks.memory_monitor import MemoryMonitor
from hocket_insight.callbacks.memory_report import MemoryReport
from hocket_insight.callbacks.nan_monitor import NaNMonitor
from hocket_insight.callbacks.optimizer_monitor import OptimizerMonitor
from hocket_insight.callbacks.runtime_estimator import RuntimeEstimator
from hocket_insight.callbacks.sample_visualizer import SampleVisualizer
from hocket_insight.callbacks.speed_monitor import SpeedMonitor
from hocket_insight.callbacks.system_monitor import SystemMonitor
from hocket_insight.callbacks.threshold_stopper import ThresholdStopper
from hocket_insight.callbacks.time_monitor import TimeMonitor
from hocket_testkit import CallbackConformance


class TestLRMonitor(CallbackConformance):
    def make(self):
        return LRMonitor()


class TestSpeedMonitor(CallbackConformance):
    def make(self):
        return SpeedMonitor(every="1ba", flops_per_sample=1e6, peak_flops=1e9)


class TestMemoryMonitor(CallbackConformance):
    def make(self):
        return MemoryMonitor(every="1ba")


class TestNaNMonitor(CallbackConformance):
    def make(self):
        return NaNMonitor()


class TestOptimizerMonitor(CallbackConformance):
    def make(self):
        return OptimizerMonitor(every=1)


class TestRuntimeEstimator(CallbackConformance):
    exempt = {
        "test_resumes_in_the_middle": "a resumed run estimates from its own batches, so its first estimate comes later"
    }

    def make(self):
        return RuntimeEstimator(every="1ba")


class TestEarlyStopping(CallbackConformance):
    def make(self):
        return EarlyStopping("eval/loss", patience=50, restore_best=False)


class TestGradientMonitor(CallbackConformance):
    def make(self):
        return GradientMonitor(every=1, histograms=True)


class TestActivationMonitor(CallbackConformance):
    def make(self):
        return ActivationMonitor(every=1, histograms=True)


class TestMemoryReport(CallbackConformance):
    def make(self):
        return MemoryReport(at=2)


class TestSystemMonitor(CallbackConformance):
    exempt = {
        test: "what it logs depends on when its thread took a sample"
        for test in ("test_logs_the_same_in_turns", "test_resumes_in_the_middle")
    }

    def make(self):
        return SystemMonitor(every="1ba", seconds=0.05)


@pytest.mark.filterwarnings("ignore:energy-monitor logs nothing")
class TestEnergyMonitor(CallbackConformance):
    def make(self):
        return EnergyMonitor(every="1ba")


class TestTimeMonitor(CallbackConformance):
    def make(self):
        return TimeMonitor(every="1ba")


class TestHeartbeat(CallbackConformance):
    def make(self):
        return Heartbeat(seconds=0.05)


class TestThresholdStopper(CallbackConformance):
    def make(self):
        return ThresholdStopper("eval/loss", above=1e9)


class TestSampleVisualizer(CallbackConformance):
    def make(self):
        return SampleVisualizer(on="train", every=1)
