"""Core's own loggers, precisions and strategy pass the suites that authors of plug-ins inherit."""

import io

from hocket.loggers.console import ConsoleLogger
from hocket.loggers.memory import MemoryLogger
from hocket.precision.bf16 import BF16
from hocket.precision.fp32 import FP32
from hocket.strategies.single import SingleDevice
from hocket_testkit import LoggerConformance, PrecisionConformance, StrategyConformance


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
