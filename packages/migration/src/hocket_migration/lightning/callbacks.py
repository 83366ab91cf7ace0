"""Lightning's callbacks under hocket: most run; those that rebuild the loop are refused, with what to write instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from hocket.errors import WrongType, WrongValue
from hocket_migration.lightning.installed_lightning import overrides, package_of

#: Callbacks that reach into Lightning's loops, and hocket's counterpart.
REFUSED = {
    "GradientAccumulationScheduler": "accumulate_grad_batches=4 in the Trainer, the same in all epochs",
    "BatchSizeFinder": "hocket={'microbatch': 'auto'}, which finds the largest microbatch that fits",
    "LearningRateFinder": "hocket sweep, with a range of learning rates",
    "ModelPruning": "torch.nn.utils.prune in a callback of your own",
    "LambdaPruning": "torch.nn.utils.prune in a callback of your own",
    "SpikeDetection": "hocket={'nonfinite': 'skip'}, or a callback of your own",
    "ThroughputMonitor": "hocket={'callbacks': ['speed-monitor']}",
    "DeviceStatsMonitor": "hocket={'callbacks': ['memory-monitor', 'system-monitor']}",
    "BackboneLambdaFinetuningCallback": "BackboneFinetuning",
    "MixedPrecisionPlugin": "precision='16-mixed'",
    "XLAStatsMonitor": "hocket={'callbacks': ['speed-monitor']}",
    "GPUStatsMonitor": "hocket={'callbacks': ['memory-monitor', 'system-monitor']}",
}
#: Callbacks that hold a copy of the full weights, and hocket's counterpart.
AVERAGING = {
    "StochasticWeightAveraging": "hocket={'algorithms': ['swa']}",
    "WeightAveraging": "hocket={'algorithms': ['ema']}",
}
#: Callbacks that hocket's progress logger stands for.
PROGRESS = ("ProgressBar", "TQDMProgressBar", "RichProgressBar")


def made(given: Mapping[str, Any], framework: ModuleType, *, others_write: bool) -> list[Any]:
    """Return the user's callbacks and Lightning's ModelCheckpoint, by the Trainer's arguments.

    Args:
        others_write: whether hocket writes checkpoints.
    """
    listed = checked(given["callbacks"], framework)
    writers = [each for each in listed if isinstance(each, framework.callbacks.Checkpoint)]
    wanted = given["enable_checkpointing"]
    if wanted is False and writers:
        raise WrongValue(
            f"Trainer(enable_checkpointing=False) was given the callback {type(writers[0]).__name__}. Omit one of them."
        )
    if given["fast_dev_run"]:
        return [each for each in listed if each not in writers]
    if wanted is not False and not writers and not others_write:
        listed.append(framework.callbacks.ModelCheckpoint())
    return merged(listed, None, framework)


def checked(given: Any, framework: ModuleType) -> list[Any]:
    """Return the callbacks to run. Raises TypeError for one that is refused, or does not belong to this framework."""
    if given is None:
        return []
    listed = list(given) if isinstance(given, Iterable) else [given]
    for callback in listed:
        if not isinstance(callback, framework.Callback):
            what = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            if isinstance(callback, type):
                raise WrongType(f"callbacks=[{what}] is a class. Give an instance: {what}(…).")
            raise WrongType(
                f"callbacks=[{what}(…)] is not a Callback of {framework.__name__}. Callbacks of hocket are given as "
                "hocket={'callbacks': […]}."
            )
    refuse(listed)
    return [each for each in listed if not _is_progress(each)]


def refuse(callbacks: Iterable[Any]) -> None:
    """Raise TypeError for a callback that does not run under hocket, such as one that Lightning's Tuner has added."""
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in REFUSED and package_of(base) is not None:
                raise WrongType(
                    f"{type(callback).__name__} reaches into Lightning's own loop and does not run under hocket. Write "
                    f"{REFUSED[base.__name__]}."
                )


def check_averaging(callbacks: Iterable[Any], *, shards: bool, resumes: bool) -> None:
    """Raise TypeError for a callback that averages weights, where the strategy shards them or hocket cannot resume it.

    Args:
        shards: whether the strategy shards weights.
        resumes: whether hocket writes or loads checkpoints.
    """
    for callback in callbacks:
        for base in type(callback).__mro__:
            write = AVERAGING.get(base.__name__) if package_of(base) is not None else None
            if write is not None and shards:
                raise WrongType(
                    f"{type(callback).__name__} averages full weights, and the strategy shards them. Write {write}, which "
                    "averages shards."
                )
            if write is not None and resumes and base.__name__ == "StochasticWeightAveraging":
                raise WrongType(
                    f"{type(callback).__name__} makes its schedule at the beginning of an epoch, so a run does not resume from "
                    f"hocket's checkpoints with it. Write {write} for it, or continue from .ckpt files by ckpt_path=."
                )


def _is_progress(callback: Any) -> bool:
    return any(base.__name__ in PROGRESS and package_of(base) is not None for base in type(callback).__mro__)


def merged(callbacks: list[Any], of_module: Any, framework: ModuleType) -> list[Any]:
    """Return the callbacks with those of ``configure_callbacks``, which replace others of their type, or else of a base of it.

    Checkpoints come last. Raises ValueError for two callbacks whose state has one key.
    """
    own = checked(of_module, framework)
    given = {type(each) for each in callbacks} - {framework.Callback}
    replaced = {next((base for base in type(each).__mro__ if base in given), None) for each in own}
    every = [each for each in callbacks if type(each) not in replaced] + own
    keys = Counter(each.state_key for each in every if overrides(each, "state_dict", framework.Callback))
    for key, number in keys.items():
        if number > 1:
            raise WrongValue(
                f"{number} callbacks have the state_key {key!r}, under which checkpoints hold their state. Omit one, or "
                "define the property state_key."
            )
    last = framework.callbacks.Checkpoint
    return [each for each in every if not isinstance(each, last)] + [each for each in every if isinstance(each, last)]
