"""Core's own callbacks, loggers, precisions and strategy pass the suites that authors of plug-ins inherit."""

import io
import json

import pytest

from hocket.callbacks.activation_monitor import ActivationMonitor
from hocket.callbacks.early_stopping import EarlyStopping
from hocket.callbacks.energy_monitor import EnergyMonitor
from hocket.callbacks.gradient_monitor import GradientMonitor
from hocket.callbacks.heartbeat import Heartbeat
from hocket.callbacks.lr_monitor import LRMonitor
from hocket.callbacks.memory_monitor import MemoryMonitor
from hocket.callbacks.memory_report import MemoryReport
from hocket.callbacks.nan_monitor import NaNMonitor
from hocket.callbacks.optimizer_monitor import OptimizerMonitor
from hocket.callbacks.runtime_estimator import RuntimeEstimator
from hocket.callbacks.sample_visualizer import SampleVisualizer
from hocket.callbacks.speed_monitor import SpeedMonitor
from hocket.callbacks.system_monitor import SystemMonitor
from hocket.callbacks.threshold_stopper import ThresholdStopper
from hocket.callbacks.time_monitor import TimeMonitor
from hocket.loggers.console import ConsoleLogger
from hocket.loggers.jsonl import JSONLinesLogger
from hocket.loggers.memory import MemoryLogger
from hocket.loggers.progress import ProgressLogger
from hocket.precision.bf16 import BF16
from hocket.precision.fp32 import FP32
from hocket.strategies.single import SingleDevice
from hocket_testkit import CallbackConformance, LoggerConformance, PrecisionConformance, StrategyConformance


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


class Printed:
    """Loggers that print lines of names and values."""

    tolerances = {
        test: (1e-3, "four digits are printed")
        for test in (
            "test_writes_down_what_is_logged", "test_goes_on_after_it_was_closed", "test_two_runs_do_not_mix",
            "test_values_that_are_not_finite",
        )
    }  # fmt: skip

    def written(self, logger, folder):
        values = {}
        for line in logger._file.getvalue().splitlines():
            for pair in line.split("  ")[1:]:
                name, _, value = pair.rpartition(" ")
                values.setdefault(name, []).append(float(value))
        return values


class TestConsole(Printed, LoggerConformance):
    def make(self):
        return ConsoleLogger(io.StringIO())


class TestProgress(LoggerConformance):
    exempt = {
        test: "without a terminal it prints what is evaluated, and the latest of the rest now and then"
        for test in (
            "test_writes_down_what_is_logged", "test_goes_on_after_it_was_closed", "test_two_runs_do_not_mix",
            "test_values_that_are_not_finite",
        )
    }  # fmt: skip

    def make(self):
        return ProgressLogger(io.StringIO())


class TestJSONLines(LoggerConformance):
    def make(self):
        return JSONLinesLogger()

    def written(self, logger, folder):
        values = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            for name, value in json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")).items():
                if "/" in name:
                    values.setdefault(name, []).append(float(value))
        return values


class TestMemory(LoggerConformance):
    def make(self):
        return MemoryLogger()

    def written(self, logger, folder):
        return {name: [value for _, value in values] for name, values in logger.metrics.items()}


class TestFP32(PrecisionConformance):
    def make(self):
        return FP32()


class TestBF16(PrecisionConformance):
    gradient_tolerance = 0.05  # eight bits

    def make(self):
        return BF16()


class TestSingle(StrategyConformance):
    world_size = 1

    def make(self):
        return SingleDevice()
