"""Composer's loggers by their names and arguments. Each returns the logger of hocket's that does this."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hocket
import hocket.plugins
from hocket_migration.composer.core.time import Time, Timestamp
from hocket_migration.composer.message_terms import in_composers
from hocket_migration.composer.plugin_factory import make, no_counterpart, refuse


def TensorboardLogger(log_dir: str | None = None, flush_interval: int = 100, rank_zero_only: bool = True) -> Any:
    """Return hocket's ``tensorboard``, which flushes by time."""
    refuse("TensorboardLogger", "Rank 0 logs.", rank_zero_only=(rank_zero_only, True))
    return make("loggers", "tensorboard", folder=log_dir)


def WandBLogger(
    project: str | None = None,
    group: str | None = None,
    name: str | None = None,
    entity: str | None = None,
    tags: list[str] | None = None,
    log_artifacts: bool = False,
    rank_zero_only: bool = True,
    init_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return hocket's ``wandb``. The run has the Trainer's ``run_name``."""
    write = "Write hocket_loggers.WandbLogger(settings={…}), and the Trainer's run_name= for the name."
    refuse(
        "WandBLogger", write,
        group=(group, None), name=(name, None), tags=(tags, None), log_artifacts=(log_artifacts, False),
        rank_zero_only=(rank_zero_only, True), init_kwargs=(init_kwargs, None),
    )  # fmt: skip
    return make("loggers", "wandb", **({} if project is None else {"project": project}), entity=entity)


def MLFlowLogger(
    experiment_name: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, Any] | None = None,
    tracking_uri: str | Path | None = None,
    **others: Any,
) -> Any:
    """Return hocket's ``mlflow``. The run has the Trainer's ``run_name``."""
    write = (
        "Write hocket_loggers.MLflowLogger(tracking_uri, experiment, tags), and the Trainer's run_name= for the name."
    )
    refuse("MLFlowLogger", write, run_name=(run_name, None), **{name: (each, None) for name, each in others.items()})
    experiment = {} if experiment_name is None else {"experiment": experiment_name}
    uri = None if tracking_uri is None else str(tracking_uri)
    return make("loggers", "mlflow", tracking_uri=uri, tags=tags, **experiment)


def CometMLLogger(workspace: str | None = None, project_name: str | None = None, **others: Any) -> Any:
    """Return hocket's ``comet``. The run has the Trainer's ``run_name``."""
    write = "Write hocket_loggers.CometLogger(project, workspace)."
    refuse("CometMLLogger", write, **{name: (each, None) for name, each in others.items()})
    return make("loggers", "comet", workspace=workspace, **({} if project_name is None else {"project": project_name}))


def FileLogger(filename: str | None = None, **others: Any) -> Any:
    """Return hocket's ``jsonl``, which writes values into the run's folder. Output to the terminal is not captured."""
    write = "Omit it: values are in metrics.jsonl in the run's folder. For what is printed: python train.py | tee log."
    refuse("FileLogger", write, filename=(filename, None), **{name: (each, None) for name, each in others.items()})
    return make("loggers", "jsonl")


def ProgressBarLogger(stream: Any = None, log_traces: bool = False) -> Any:
    """Return hocket's ``progress``."""
    refuse("ProgressBarLogger", "Omit it.", log_traces=(log_traces, False))
    return _named_as_composers("progress")(file=_file(stream))


def _named_as_composers(name: str) -> Any:
    """Return a logger's class that prints the last lines of a fit with Composer's arguments."""
    kind = hocket.plugins.get("loggers", name)

    def log_summary(self: Any, state: hocket.State, lines: Sequence[str]) -> None:
        kind.log_summary(self, state, [in_composers(line) for line in lines])

    return type(kind.__name__, (kind,), {"log_summary": log_summary, "__doc__": kind.__doc__})


def _file(stream: Any) -> Any:
    return {"stderr": sys.stderr, "stdout": sys.stdout}.get(stream, stream) if isinstance(stream, str) else stream


def ConsoleLogger(log_interval: Any = "1ba", stream: Any = None, log_traces: bool = False) -> Any:
    """Return hocket's ``console``, which prints the values of evaluations, and in an interval those of training."""
    refuse("ConsoleLogger", "Omit it.", log_traces=(log_traces, False))
    kind = _named_as_composers("console")
    every, passed = Time.from_input(log_interval, "ep"), 0

    def log_metrics(self: Any, state: hocket.State, metrics: Mapping[str, float]) -> None:
        nonlocal passed
        evaluated = {name for name in metrics if name.partition("/")[0] in state.eval_sets}
        now = int(Timestamp(state.timestamp).get(every.unit)) // max(int(every), 1)
        due = now != passed and int(every) > 0
        passed = now if due else passed
        kind.log_metrics(self, state, metrics if due else {name: metrics[name] for name in evaluated})

    return type(kind.__name__, (kind,), {"log_metrics": log_metrics, "__doc__": kind.__doc__})(file=_file(stream))


SlackLogger = no_counterpart("SlackLogger", "Use hocket_loggers.WebhookLogger(url), with the URL of a Slack webhook.")
NeptuneLogger = no_counterpart("NeptuneLogger", "Use TensorboardLogger, WandBLogger, MLFlowLogger or CometMLLogger.")
MosaicMLLogger = no_counterpart("MosaicMLLogger", "It belongs to a service; use TensorboardLogger or another one.")
RemoteUploaderDownloader = no_counterpart(
    "RemoteUploaderDownloader", "Use hocket_loggers.ArtifactsLogger(url), or a URL as save_folder=."
)
