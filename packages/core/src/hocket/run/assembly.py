"""Assemble a Trainer's run from its settings: a function for each stage, in the order in which the Trainer calls them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket.basics.losses import Reduction, reduction_of
from hocket.basics.run_folder import Run, RunFolder, TemporaryFolder
from hocket.devices import model_placement
from hocket.help import optional_packages
from hocket.hookspecs.attachment import Attachment
from hocket.loop import whole_batch
from hocket.loop.fit import FitLoop
from hocket.loop.nonfinite import NonFiniteGuard
from hocket.loop.settings import Settings, reduction
from hocket.optim.groups import described, hyperparameters
from hocket.optim.optimizers import has_modes, make_optimizers
from hocket.plugins.bus import Bus
from hocket.run.joined import Joined
from hocket.run.resolving import Parts, resolve, without_writing_loggers
from hocket.state.given_task import task_of
from hocket.state.state import State
from hocket.state.task import Task, events_of

if TYPE_CHECKING:
    from hocket.plugins.plan import Plan


def parts_of(settings: Settings, model: nn.Module) -> Parts:
    """Build the plug-ins that the settings name or imply (``summary=True`` implies one). Check them and the model."""
    from hocket.plugins import instance_owners  # here, so that importing the Trainer stays cheap

    checkpoints = [] if settings.checkpoints is None else [settings.checkpoints]
    parts = resolve(
        algorithms=settings.algorithms,
        callbacks=[*settings.callbacks, *settings.profile, *checkpoints],
        loggers=settings.loggers,
        strategy=settings.strategy,
        precision=settings.precision,
        device=settings.device,
        actions=settings.actions,
        devices=settings.devices,
    )
    parts = parts if settings.lasting else without_writing_loggers(parts)
    instance_owners.check(parts.attachments)
    if settings.deterministic:
        from hocket.loop import determinism

        determinism.prepare(parts.device)
    model_placement.check_model(model, settings.device, parts.strategy.materializes)
    parts.attachments.extend(_stood_for(settings))
    return parts


def _stood_for(settings: Settings) -> Iterator[Attachment]:
    """Make the plug-ins that arguments other than lists of plug-ins stand for."""
    if settings.batch_transform is not None:
        from hocket.loop.batch_transform import BatchTransform

        yield BatchTransform.attachment(settings.batch_transform)
    if settings.microbatch == "auto":
        search = optional_packages.module("hocket_general.auto_microbatch", "microbatch='auto'")
        remembered = settings.folder / "microbatch.json" if settings.lasting else None
        yield search.AutoMicrobatch.attachment(
            remembered, (settings.compile, settings.deterministic, settings.accumulate)
        )
    if settings.summary:
        yield optional_packages.module("hocket_insight.model_table", "summary=True").ShowSummary.attachment()
    if settings.limits:
        from hocket.loop.duration_limits import Limits

        yield Limits(settings.limits).attachment()


def task_of_run(settings: Settings, model: nn.Module, bus: Bus) -> Task:
    """Return the task that the arguments describe, and attach it to the bus if it listens to events."""
    task = task_of(model, settings.loss, settings.inputs, settings.targets, settings.outputs)
    if events := events_of(task):
        bus.attach(Attachment("task", type(task).__name__, events))
    return task


def reduction_of_run(settings: Settings, task: Task) -> Reduction | None:
    """Return the declared reduction of the loss: the Trainer's, the task's, or that of the loss function."""
    return settings.loss_reduction or reduction(task.loss_reduction) or reduction_of(settings.loss)


def plan_of(settings: Settings, parts: Parts, task: Task, bus: Bus) -> Plan:
    """Return the plan of the run. Raises PlanError for what cannot work together."""
    from hocket.plugins.plan import make_plan

    whole_batch.check_plan(reduction_of_run(settings, task), settings, parts.strategy, settings.devices or 1)
    return make_plan(bus, task, parts.strategy, settings.facts(task.model, parts.reasons))


def state_of(settings: Settings, parts: Parts, task: Task, joined: Joined) -> State:
    """Return the state of a new run, with the name that all ranks have."""
    loss_reduction = reduction_of_run(settings, task)
    whole_batch.check_plan(loss_reduction, settings, parts.strategy)  # again, with the number of ranks that were joined
    run = joined.bus.broadcast_object(Run.new(settings.run_name))
    state = State(
        task=task,
        bus=joined.bus,
        strategy=parts.strategy,
        precision=parts.precision,
        device=joined.device,
        device_kind=parts.device,
        run=run,
        folder=(RunFolder if settings.lasting else TemporaryFolder)(settings.folder, run),
        seed=settings.seed,
        microbatch=settings.samples_per_microbatch(parts.strategy),
        resumes=settings.resume,
    )
    state.progress.min_duration = settings.min_duration
    state.optimization.clipping = settings.clip_gradients
    state.optimization.loss_reduction = loss_reduction
    return state


def loop_of(settings: Settings, state: State, guard: NonFiniteGuard) -> FitLoop:
    """Return the loop, without data and metrics yet."""
    compiled = None if settings.compile is None else partial(torch.compile, **settings.compile)
    windows = None
    if settings.accumulate is not None:
        from hocket.loop.accumulation import Windows

        windows = Windows(state, settings.accumulate, settings.microbatch is None)
    return FitLoop(state, guard, settings.log_every, compiled, windows)


def set_up(settings: Settings, state: State, joined: Joined) -> tuple[dict[str, str], str | None]:
    """Set up model, optimizers and schedules. Return the optimizers' initial hyperparameters, and their line of the plan.

    Surgery comes before optimizers, which hold the new parameters; compiling after both; wrapping by the strategy after all
    changes of the model; schedules after it, because a strategy may replace optimizers.
    """
    bus = state.bus
    state.task = joined.convert(state.task)
    bus.init(state)
    joined.place(state.task)  # what surgery has made
    named = make_optimizers(settings.optimizer, state.task, state.replacements)
    state.optimization.optimizer_names, optimizers = list(named), list(named.values())
    line = described(named, state.task) if named else None
    initial = hyperparameters(optimizers)
    if settings.compile is not None and not state.task.owns_steps:
        state.task.compile(**settings.compile)
    if settings.compile is not None or "torch._dynamo" in sys.modules:  # without it nothing is compiled
        from hocket.loop.graphs import may_overwrite

        state.overwrites = may_overwrite(state.task, settings.compile, state.device)
    state.prepared, state.optimization.optimizers = joined.prepare(state.task, optimizers)
    from hocket.optim.learning_rate_schedules import make_schedules

    state.optimization.schedules = make_schedules(
        settings.schedule, state.optimizers, settings.schedule_every, state.optimizer_names
    )
    if averaging := [optimizer for optimizer in state.optimizers if has_modes(optimizer)]:
        needing = f"Switching {type(averaging[0]).__name__} between train() and eval()"
        averages = optional_packages.module("hocket_general.optimizer_averages", needing)
        bus.attach(averages.OptimizerAverages.attachment(state, averaging))
    return initial, line
