"""The built-in callbacks, each declared by an entry point and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.callbacks.early_stopping import EarlyStopping
    from hocket.callbacks.lr_monitor import LRMonitor
    from hocket.callbacks.memory_monitor import MemoryMonitor
    from hocket.callbacks.nan_monitor import NaNMonitor
    from hocket.callbacks.optimizer_monitor import OptimizerMonitor
    from hocket.callbacks.runtime_estimator import RuntimeEstimator
    from hocket.callbacks.speed_monitor import SpeedMonitor

__all__ = [
    "EarlyStopping",
    "LRMonitor",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "EarlyStopping": "early_stopping",
        "LRMonitor": "lr_monitor",
        "MemoryMonitor": "memory_monitor",
        "NaNMonitor": "nan_monitor",
        "OptimizerMonitor": "optimizer_monitor",
        "RuntimeEstimator": "runtime_estimator",
        "SpeedMonitor": "speed_monitor",
    },
)
