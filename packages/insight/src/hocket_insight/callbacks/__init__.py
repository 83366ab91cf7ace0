"""The built-in callbacks, each declared by an entry point and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
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

__all__ = [
    "ActivationMonitor",
    "EarlyStopping",
    "EnergyMonitor",
    "GradientMonitor",
    "Heartbeat",
    "LRMonitor",
    "MemoryMonitor",
    "MemoryReport",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SampleVisualizer",
    "SpeedMonitor",
    "SystemMonitor",
    "ThresholdStopper",
    "TimeMonitor",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ActivationMonitor": "activation_monitor",
        "EarlyStopping": "early_stopping",
        "EnergyMonitor": "energy_monitor",
        "GradientMonitor": "gradient_monitor",
        "Heartbeat": "heartbeat",
        "LRMonitor": "lr_monitor",
        "MemoryMonitor": "memory_monitor",
        "MemoryReport": "memory_report",
        "NaNMonitor": "nan_monitor",
        "OptimizerMonitor": "optimizer_monitor",
        "RuntimeEstimator": "runtime_estimator",
        "SampleVisualizer": "sample_visualizer",
        "SpeedMonitor": "speed_monitor",
        "SystemMonitor": "system_monitor",
        "ThresholdStopper": "threshold_stopper",
        "TimeMonitor": "time_monitor",
    },
)
