"""For plug-in authors: conformance suites to inherit, ranks on one machine, and a check that nothing waits for the device.

::

    class TestGradientNoise(hocket.testkit.AlgorithmConformance):
        def make(self):
            return GradientNoise()

The suites need pytest and are imported on first use; the rest of the kit does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket.errors import MissingPackage

if TYPE_CHECKING:
    from hocket_testkit.actions import ActionsConformance
    from hocket_testkit.algorithms import AlgorithmConformance
    from hocket_testkit.callbacks import CallbackConformance
    from hocket_testkit.commands import CommandConformance
    from hocket_testkit.datasets import DatasetConformance
    from hocket_testkit.devices import DeviceConformance
    from hocket_testkit.loggers import LoggerConformance
    from hocket_testkit.optimizers import OptimizerConformance
    from hocket_testkit.precisions import PrecisionConformance
    from hocket_testkit.ranks import RankError, run_ranks
    from hocket_testkit.schedules import ScheduleConformance
    from hocket_testkit.shards import ShardsConformance
    from hocket_testkit.sources import SourceConformance
    from hocket_testkit.strategies import StrategyConformance
    from hocket_testkit.sync import SynchronisationError, no_sync

#: Public name -> the module that defines it.
_SUITES = {
    "ActionsConformance": "actions",
    "AlgorithmConformance": "algorithms",
    "CallbackConformance": "callbacks",
    "CommandConformance": "commands",
    "DatasetConformance": "datasets",
    "DeviceConformance": "devices",
    "LoggerConformance": "loggers",
    "OptimizerConformance": "optimizers",
    "PrecisionConformance": "precisions",
    "ScheduleConformance": "schedules",
    "ShardsConformance": "shards",
    "SourceConformance": "sources",
    "StrategyConformance": "strategies",
}
_OTHERS = {"RankError": "ranks", "SynchronisationError": "sync", "no_sync": "sync", "run_ranks": "ranks"}

__all__ = [
    "ActionsConformance",
    "AlgorithmConformance",
    "CallbackConformance",
    "CommandConformance",
    "DatasetConformance",
    "DeviceConformance",
    "LoggerConformance",
    "OptimizerConformance",
    "PrecisionConformance",
    "RankError",
    "ScheduleConformance",
    "ShardsConformance",
    "SourceConformance",
    "StrategyConformance",
    "SynchronisationError",
    "no_sync",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name in _SUITES:
        _need_pytest(name)
    elif name not in _OTHERS:
        raise AttributeError(f"module 'hocket.testkit' has no attribute '{name}'; it has {', '.join(__all__)}")
    module = importlib.import_module(f"hocket_testkit.{_SUITES.get(name) or _OTHERS[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _need_pytest(name: str) -> None:
    """Import pytest, and have it rewrite the assertions of the suites."""
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"hocket.testkit.{name} is a suite of tests for pytest, which is not installed here ({error}). Type: pip "
            "install pytest. Only the suites of hocket.testkit need it; run_ranks and no_sync do not."
        ) from None
    pytest.register_assert_rewrite(
        "hocket_testkit.conformance", "hocket_testkit.runs", *(f"hocket_testkit.{m}" for m in _SUITES.values())
    )
