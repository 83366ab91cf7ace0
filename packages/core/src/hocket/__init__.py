"""hocket: train PyTorch models with plug-ins that are discovered, checked before launch and measured.

Names are imported on first use, so ``import hocket`` is cheap. They are those below, which `lazy.declared` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import (
        callbacks as callbacks,
        checkpoints as checkpoints,
        data as data,
        plugins as plugins,
        testkit as testkit,
    )
    from hocket.basics.losses import Apart as Apart, Loss as Loss
    from hocket.basics.time import Interval as Interval, Time as Time, Unit as Unit
    from hocket.basics.timestamp import Timestamp as Timestamp
    from hocket.devices import Device as Device
    from hocket.hookspecs import Event as Event, hookimpl as hookimpl
    from hocket.hookspecs.algorithm import Algorithm as Algorithm, Phase as Phase
    from hocket.hookspecs.callback import Callback as Callback
    from hocket.hookspecs.logger import Logger as Logger
    from hocket.hookspecs.needs import Need as Need
    from hocket.loop.evaluate import EvalSet as EvalSet
    from hocket.precision import Precision as Precision
    from hocket.run.result import Result as Result
    from hocket.run.trainer import Trainer as Trainer
    from hocket.state.requests import Decision as Decision
    from hocket.state.span import Span as Span
    from hocket.state.state import State as State
    from hocket.state.task import Task as Task
    from hocket.strategies import Strategy as Strategy
    from hocket.surgery import NoEffectWarning as NoEffectWarning
    from hocket_checkpoints.periodic_saving import Checkpoints as Checkpoints
    from hocket_insight.model_table import model_summary as model_summary
    from hocket_strategies.custom_loops.runtime import Runtime as Runtime
    from hocket_strategies.launching.forks import launch as launch


def __getattr__(name: str) -> Any:
    from hocket.help.lazy import lazy

    if name == "__version__":
        from importlib.metadata import version

        return version("hocket")
    try:
        return lazy("hocket")[0](name)
    except UnicodeDecodeError as error:  # in torch, which reads the entry points of every distribution
        from hocket.plugins import entry_points, registry

        for problem in registry.installed().problems:
            error.add_note(f"{problem.dist} {problem.version}: {problem.text}, or set {entry_points.AUTOLOAD}=0.")
        raise


def __dir__() -> list[str]:
    from hocket.help.lazy import declared

    return [*declared("hocket"), "__version__"]
