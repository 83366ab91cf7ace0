"""hocket: train PyTorch models with plug-ins that are discovered, checked before launch and measured.

Names are imported on first use, so ``import hocket`` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import (
        callbacks as callbacks,
        checkpoints as checkpoints,
        data as data,
        plugins as plugins,
        testkit as testkit,
    )
    from hocket.algorithm import Algorithm as Algorithm, Phase as Phase
    from hocket.callback import Callback as Callback
    from hocket.devices import Device as Device
    from hocket.hookspecs import Event as Event, hookimpl as hookimpl
    from hocket.hookspecs.needs import Need as Need
    from hocket.logger import Logger as Logger
    from hocket.losses import Apart as Apart, Loss as Loss
    from hocket.precision import Precision as Precision
    from hocket.result import Result as Result
    from hocket.span import Span as Span
    from hocket.state import State as State
    from hocket.strategies import Strategy as Strategy
    from hocket.surgery import NoEffectWarning as NoEffectWarning
    from hocket.task import Task as Task
    from hocket.time import Interval as Interval, Time as Time, Unit as Unit
    from hocket.timestamp import Timestamp as Timestamp
    from hocket.trainer import Trainer as Trainer
    from hocket.training.evaluate import EvalSet as EvalSet
    from hocket.training.requests import Decision as Decision
    from hocket_checkpoints.policy import Checkpoints as Checkpoints
    from hocket_insight.model_table import model_summary as model_summary
    from hocket_strategies.custom_loops.runtime import Runtime as Runtime
    from hocket_strategies.launching.forks import launch as launch

#: Public name -> the module that defines it; empty for a module.
_PUBLIC = {
    "Algorithm": "hocket.algorithm",
    "Apart": "hocket.losses",
    "Callback": "hocket.callback",
    "Checkpoints": "hocket_checkpoints.policy",
    "Decision": "hocket.training.requests",
    "Device": "hocket.devices",
    "EvalSet": "hocket.training.evaluate",
    "Event": "hocket.hookspecs",
    "Interval": "hocket.time",
    "Logger": "hocket.logger",
    "Loss": "hocket.losses",
    "Need": "hocket.hookspecs.needs",
    "NoEffectWarning": "hocket.surgery",
    "Phase": "hocket.algorithm",
    "Precision": "hocket.precision",
    "Result": "hocket.result",
    "Runtime": "hocket_strategies.custom_loops.runtime",
    "Span": "hocket.span",
    "State": "hocket.state",
    "Strategy": "hocket.strategies",
    "Task": "hocket.task",
    "Time": "hocket.time",
    "Timestamp": "hocket.timestamp",
    "Trainer": "hocket.trainer",
    "Unit": "hocket.time",
    "callbacks": "",
    "checkpoints": "",
    "data": "",
    "hookimpl": "hocket.hookspecs",
    "launch": "hocket_strategies.launching.forks",
    "model_summary": "hocket_insight.model_table",
    "plugins": "",
    "testkit": "",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hocket")
    if name == "__all__":
        from importlib.util import find_spec

        return [each for each, module in _PUBLIC.items() if find_spec(module.partition(".")[0] or "hocket")]
    if name not in _PUBLIC:
        from hocket.lazy import Absent

        raise Absent("hocket", name, sorted(_PUBLIC))
    from hocket import elsewhere

    module = _PUBLIC[name]
    try:
        value = getattr(elsewhere.module(module), name) if module else importlib.import_module(f"hocket.{name}")
    except elsewhere.NotInstalled as absent:
        raise AttributeError(absent.msg, name=name) from None
    except UnicodeDecodeError as error:  # in torch, which reads the entry points of every distribution
        from hocket.plugins import catalog, distributions

        for problem in catalog.installed().problems:
            error.add_note(f"{problem.dist} {problem.version}: {problem.text}, or set {distributions.AUTOLOAD}=0.")
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]
