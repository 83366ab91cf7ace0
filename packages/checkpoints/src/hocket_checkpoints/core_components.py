"""The components of core: what a checkpoint holds without those of plug-ins and Tasks."""

from __future__ import annotations

from hocket.run.content import Parts
from hocket.state.component import Component
from hocket.state.state import State
from hocket_checkpoints.components.aggregates import LoggedValues
from hocket_checkpoints.components.configuration import Configuration
from hocket_checkpoints.components.data import EvaluationData, TrainingData
from hocket_checkpoints.components.generic import (
    Attribute,
    AttributeIfNone,
    Description,
    Stateful,
    StatefulOfRank,
    TimeAttribute,
)
from hocket_checkpoints.components.manual_steps import GradientsByHand
from hocket_checkpoints.components.metrics import Metrics, TrainMetrics
from hocket_checkpoints.components.model import Model, Modes
from hocket_checkpoints.components.nonfinite import Guard
from hocket_checkpoints.components.nonpersistent import HiddenState
from hocket_checkpoints.components.omitted_weights import Omitted
from hocket_checkpoints.components.optimizers import Optimizers, Schedules
from hocket_checkpoints.components.plugins import Costs, Plugins, described
from hocket_checkpoints.components.step import Batch, Losses, RankSamples
from hocket_checkpoints.components.task import ExtraState
from hocket_checkpoints.content import Content


def content_of(state: State, parts: Parts) -> Content:
    """Return the content of a run's checkpoints."""
    training, evaluation = TrainingData(state, parts.loop, parts.module), EvaluationData(state)
    configuration = Configuration(state, parts.arguments, parts.hyperparameters)
    components = _components(state, parts, configuration, training, evaluation)
    return Content(state, components, configuration, training, evaluation)


def _components(
    state: State,
    parts: Parts,
    configuration: Configuration,
    training_data: TrainingData,
    evaluation_data: EvaluationData,
) -> list[Component]:
    """Return core's own components, in the order in which they are saved and loaded."""
    progress = state.progress
    return [
        Description("run_id", lambda: state.run.id),
        Description("run_name", lambda: state.run_name),
        Description("world_size", lambda: state.strategy.world_size),
        Description("attached", lambda: described(state.bus.attachments)),
        Description("config", lambda: state.identity.config),
        Description("model_prefix", lambda: state.model_prefix),
        Omitted(state),
        Model(state),
        Modes(state),
        Optimizers(state),  # after the model: sharded optimizers look at the parameters
        Schedules(state),
        configuration,  # after the optimizers, whose values it records
        Plugins(state),
        Stateful("timestamp", progress.timestamp),
        Stateful("previous", progress.previous),
        Stateful("progress", progress),
        Stateful("requested", state.requests),
        Metrics(state),
        Attribute("logged", state.values, "logged"),
        Stateful("history", state.history, "the history", optional=True),
        Costs(state),
        Stateful("watched", state.watched, "a logged value", optional=True),
        Attribute("microbatch", state, "microbatch"),
        Batch(state),
        AttributeIfNone("epoch_length", progress, "epoch_length"),
        TimeAttribute("max_duration", progress, "max_duration"),
        Stateful("fit", parts.loop),
        TimeAttribute("fit.until", progress, "fit_until"),
        Attribute("fit.asked", progress, "fit_asked"),
        Guard(state, parts.guard),
        *([] if parts.loop.steps is None else [GradientsByHand(state, parts.loop.steps)]),
        # --- each rank has its own
        StatefulOfRank("generators", state.generators, fresh=False),
        TrainMetrics(parts.loop),
        LoggedValues(state),
        training_data,
        evaluation_data,
        Losses(state),
        RankSamples(state),
        HiddenState(state),
        ExtraState(state),
        StatefulOfRank("random", parts.stream, fresh=True),  # last: loading the others may draw random numbers
    ]
