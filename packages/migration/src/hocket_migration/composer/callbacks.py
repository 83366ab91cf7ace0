"""Composer's callbacks by their names and arguments. Functions return the callback of hocket's that does this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import WrongValue
from hocket_migration.composer.core.callback import Callback
from hocket_migration.composer.core.time import Time
from hocket_migration.composer.plugin_factory import make, no_counterpart, refuse
from hocket_migration.composer.stoppers import EarlyStopper, ThresholdStopper

__all__ = [
    "ActivationMonitor", "CheckpointSaver", "EarlyStopper", "ExportForInferenceCallback", "FreeOutputs", "Generate",
    "ImageVisualizer", "LRMonitor", "LoadCheckpoint", "MLPerfCallback", "MemoryMonitor", "MemorySnapshot", "NaNMonitor",
    "OOMObserver", "OptimizerMonitor", "RuntimeEstimator", "SpeedMonitor", "SystemMetricsMonitor", "ThresholdStopper",
]  # fmt: skip


def _batches(interval: int | str | Time, owner: str) -> int:
    time = Time.from_input(interval, "ep")
    if time.unit != "ba":
        raise WrongValue(f"{owner} was given interval='{time}'. Write a number of batches, such as '100ba'.")
    return int(time)


def ActivationMonitor(
    interval: int | str | Time = "25ba", ignore_module_types: Sequence[str] | None = None, only_log_wandb: bool = True
) -> Any:
    """Return hocket's ``activation-monitor``, for all loggers."""
    write = "Write hocket's: ActivationMonitor(layers='*', types=['Linear'])."
    refuse("ActivationMonitor", write, ignore_module_types=(ignore_module_types, None))
    return make("callbacks", "activation-monitor", every=_batches(interval, "ActivationMonitor"))


def OptimizerMonitor(log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> Any:
    """Return hocket's ``optimizer-monitor``, or ``gradient-monitor`` without ``log_optimizer_metrics``."""
    if not log_optimizer_metrics:
        return make("callbacks", "gradient-monitor", every=batch_log_interval, by="parameter")
    return make("callbacks", "optimizer-monitor", every=batch_log_interval)


def LRMonitor() -> Any:
    """Return hocket's ``lr-monitor``."""
    return make("callbacks", "lr-monitor")


def MemoryMonitor(memory_keys: dict[str, str] | None = None, dist_aggregate_batch_interval: int | None = None) -> Any:
    """Return hocket's ``memory-monitor``."""
    refuse(
        "MemoryMonitor", "It logs all statistics, of rank 0.",
        memory_keys=(memory_keys, None), dist_aggregate_batch_interval=(dist_aggregate_batch_interval, None),
    )  # fmt: skip
    return make("callbacks", "memory-monitor")


def NaNMonitor() -> Any:
    """Return hocket's ``nan-monitor``. The Trainer raises an error for a loss that is NaN without it, too."""
    return make("callbacks", "nan-monitor")


def SpeedMonitor(window_size: int = 100, gpu_flops_available: float | None = None, time_unit: str = "hours") -> Any:
    """Return hocket's ``speed-monitor``, which logs the speed of each ``window_size`` batches. It logs no wall clock times."""
    refuse("SpeedMonitor", "hocket logs seconds.", time_unit=(time_unit, "hours"))
    return make("callbacks", "speed-monitor", every=f"{window_size}ba", peak_flops=gpu_flops_available)


def RuntimeEstimator(skip_batches: int = 1, time_unit: str = "hours") -> Any:
    """Return hocket's ``runtime-estimator``, which logs seconds."""
    return make("callbacks", "runtime-estimator", skip=skip_batches)


def SystemMetricsMonitor(log_all_data: bool = False) -> Any:
    """Return hocket's ``system-monitor``."""
    refuse("SystemMetricsMonitor", "It logs the load of the host of rank 0.", log_all_data=(log_all_data, False))
    return make("callbacks", "system-monitor")


def Generate(prompts: list[str], interval: str | int | Time, batch_size: int | None = None, **kwargs: Any) -> Any:
    """Return hocket's ``generate``."""
    refuse("Generate", "All prompts are one batch.", batch_size=(batch_size, None))
    return make("callbacks", "generate", prompts=prompts, every=str(Time.from_input(interval, "ep")), **kwargs)


def ImageVisualizer(
    interval: int | str | Time = "100ba",
    mode: str = "input",
    num_images: int = 8,
    channels_last: bool = False,
    input_key: Any = 0,
    target_key: Any = 1,
) -> Any:
    """Return hocket's ``sample-visualizer`` of training batches."""
    refuse("ImageVisualizer", "Images are (C, H, W).", mode=(mode, "input"), channels_last=(channels_last, False))
    return make(
        "callbacks", "sample-visualizer",
        on="train", every=_batches(interval, "ImageVisualizer"), samples=num_images, input_key=input_key,
        target_key=target_key,
    )  # fmt: skip


def OOMObserver(max_entries: int = 100_000, **files: Any) -> Any:
    """Return hocket's ``memory-report``, which writes into the run's folder."""
    refuse(
        "OOMObserver", "The report is in the run's folder.", **{name: (value, None) for name, value in files.items()}
    )
    return make("callbacks", "memory-report", entries=max_entries)


def MemorySnapshot(skip_batches: int = 1, interval: Any = "3ba", max_entries: int = 100_000, **files: Any) -> Any:
    """Return hocket's ``memory-report``, which writes after ``skip_batches`` and an interval."""
    refuse(
        "MemorySnapshot", "The report is in the run's folder.", **{name: (value, None) for name, value in files.items()}
    )
    at = skip_batches + _batches(interval, "MemorySnapshot")
    return make("callbacks", "memory-report", at=at, record=True, entries=max_entries)


class CheckpointSaver(Callback):
    """Write checkpoints, as the Trainer's ``save_folder`` and the other arguments of that kind do.

    The Trainer takes one, unless it has a ``save_folder``. Raises ValueError for arguments without a counterpart.
    """

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt",
        latest_filename: str | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | None = "{run_name}/checkpoints/latest-rank{rank}.pt",
        save_interval: int | str | Time | Callable[[Any, Any], bool] = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: Any = None,
    ) -> None:
        refuse("CheckpointSaver", "Checkpoints hold all of the state.", ignore_keys=(ignore_keys, None))
        #: The arguments of the Trainer that do this.
        self.arguments = {
            "save_folder": folder, "save_filename": str(filename), "save_latest_filename": latest_filename,
            "save_interval": save_interval, "save_overwrite": overwrite, "save_weights_only": weights_only,
            "save_num_checkpoints_to_keep": num_checkpoints_to_keep,
        }  # fmt: skip


LoadCheckpoint = no_counterpart("LoadCheckpoint", "Pass load_path= and load_weights_only= to the Trainer.")
ExportForInferenceCallback = no_counterpart(
    "ExportForInferenceCallback", "Call torch.export.export(trainer.state.model.eval(), …) after fit()."
)
FreeOutputs = no_counterpart("FreeOutputs", "Omit it: outputs are freed after each microbatch.")
MLPerfCallback = no_counterpart("MLPerfCallback", "Omit it, or write a Callback with fit_start, eval_end and fit_end.")
