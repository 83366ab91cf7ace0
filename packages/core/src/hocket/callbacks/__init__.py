"""The built-in callbacks, each declared by an entry point and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
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
