"""The built-in callbacks, each declared by an entry point and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_insight.callbacks.activation_monitor import ActivationMonitor as ActivationMonitor
    from hocket_insight.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from hocket_insight.callbacks.energy_monitor import EnergyMonitor as EnergyMonitor
    from hocket_insight.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
    from hocket_insight.callbacks.heartbeat import Heartbeat as Heartbeat
    from hocket_insight.callbacks.lr_monitor import LRMonitor as LRMonitor
    from hocket_insight.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from hocket_insight.callbacks.memory_report import MemoryReport as MemoryReport
    from hocket_insight.callbacks.nan_monitor import NaNMonitor as NaNMonitor
    from hocket_insight.callbacks.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from hocket_insight.callbacks.runtime_estimator import RuntimeEstimator as RuntimeEstimator
    from hocket_insight.callbacks.sample_visualizer import SampleVisualizer as SampleVisualizer
    from hocket_insight.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from hocket_insight.callbacks.system_monitor import SystemMonitor as SystemMonitor
    from hocket_insight.callbacks.threshold_stopper import ThresholdStopper as ThresholdStopper
    from hocket_insight.callbacks.time_monitor import TimeMonitor as TimeMonitor

__getattr__, __dir__ = lazy(__name__)
