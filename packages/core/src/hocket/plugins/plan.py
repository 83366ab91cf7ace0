"""The plan of a run: call orders, needs and planned surgery. It is made and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.basics.display import html
from hocket.basics.kinds import singular
from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs import Actions, Event
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.bus import BusLike
from hocket.hookspecs.events import MICROBATCH_EVENTS
from hocket.hookspecs.needs import Need

if TYPE_CHECKING:
    from hocket.hookspecs import StrategyLike
    from hocket.state.task import Task

_ACTIONS = [name for name in vars(Actions) if not name.startswith("_")]


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The plan of a Trainer. ``print(plan)`` shows it, and a notebook shows it as a table."""

    #: Lines about the run, by topic: model, duration, device …
    run: Mapping[str, str]
    attachments: tuple[Attachment, ...]
    #: Names of the plug-ins that act on each event, in call order; events without listeners are omitted.
    events: Mapping[str, tuple[str, ...]]
    #: Names of the plug-ins that surround or replace each action, outermost first.
    actions: Mapping[str, tuple[str, ...]]
    #: Modules that each algorithm's surgery would replace.
    surgery: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{about:<11} {text}" for about, text in self.run.items()]
        lines += [f"{attachment.kind:<11} {_described(attachment)}" for attachment in self.attachments]
        lines += _table("events", self.events) + _table("actions", self.actions)
        for name, touched in self.surgery.items():
            lines.append(f"surgery     {name}: {len(touched) or 'nothing'} to replace")
            lines += [f"            {line}" for line in touched]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = {about: [text] for about, text in self.run.items()}
        for attachment in self.attachments:
            if attachment.kind != "actions":  # below, "actions" are those that plug-ins change
                rows.setdefault(attachment.kind, []).append(_described(attachment))
        rows["events"] = [f"{hook}: {' > '.join(who)}" for hook, who in self.events.items()]
        rows["actions"] = [f"{hook}: {' > '.join(who)}" for hook, who in self.actions.items()]
        rows["surgery"] = [f"{name}: {', '.join(touched) or 'nothing'}" for name, touched in self.surgery.items()]
        return html("Plan", {about: "\n".join(lines) for about, lines in rows.items() if lines})


def _described(attachment: Attachment) -> str:
    details = [f"{attachment.dist} {attachment.version}" if attachment.dist else "given"]
    if attachment.config:
        details.append(", ".join(f"{key}={value!r}" for key, value in attachment.config.items()))
    return f"{attachment.name}  ({'; '.join(details)})"


def _table(title: str, hooks: Mapping[str, tuple[str, ...]]) -> list[str]:
    if not hooks:
        return [f"{title:<11} only the training loop"]
    width = max(map(len, hooks))
    return [f"{title:<11} in order"] + [
        f"            {hook:<{width}}  {' > '.join(who)}" for hook, who in hooks.items()
    ]


def make_plan(bus: BusLike, task: Task, strategy: StrategyLike, run: Mapping[str, str]) -> Plan:
    """Return the plan of a run, without changing anything.

    Raises:
        PlanError: an algorithm or the task needs a feature that the strategy does not offer.
    """
    if task.owns_steps and Need.SEVERAL_STEPS not in strategy.offers:
        raise PlanError(
            f"{type(task).__name__} takes its own optimizer steps in train_batch, but strategy '{_name_of(strategy, bus)}' "
            "steps all optimizers at once. Choose another «strategy=», such as 'ddp'."
        )
    for attachment in bus.attachments:
        needs = getattr(attachment.obj, "needs", None)
        if attachment.kind == "algorithms" and needs is not None and (missing := needs & ~strategy.offers):
            raise PlanError(
                f"Algorithm '{attachment.name}' needs {_words(missing)}, which strategy "
                f"'{_name_of(strategy, bus)}' does not offer. Remove '{attachment.name}', or choose another «strategy=»."
            )
        if strategy.microbatch_events or attachment.kind not in ("algorithms", "task"):
            continue
        if acts := [event.value for event in MICROBATCH_EVENTS if attachment in bus.listeners(event.value)]:
            what = singular(attachment.kind)
            raise PlanError(
                f"{what.capitalize()} '{attachment.name}' acts on {', '.join(acts)}, but strategy "
                f"'{_name_of(strategy, bus)}' computes the gradients of a batch itself, without these events. Remove "
                f"{'these methods' if what == 'task' else 'the algorithm'}, or choose another «strategy=»."
            )
    events, actions = calls(bus)
    return Plan(
        run=run,
        attachments=bus.attachments,
        events=events,
        actions=actions,
        surgery={
            attachment.name: tuple(attachment.obj.touches(task.model))
            for attachment in bus.attachments
            if attachment.kind == "algorithms" and Event.INIT in attachment.obj.events
        },
    )


def calls(bus: BusLike) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the names of the plug-ins on each event, and around each action, in call order."""
    return _listeners(bus, [event.value for event in Event]), _listeners(bus, _ACTIONS)


def _listeners(bus: BusLike, hooks: list[str]) -> dict[str, tuple[str, ...]]:
    who = {
        hook: tuple(attachment.name for attachment in bus.listeners(hook) if attachment.kind != "actions")
        for hook in hooks
    }
    return {hook: names for hook, names in who.items() if names}


def _words(needs: Any) -> str:
    return ", ".join(need.name.lower().replace("_", " ") for need in needs)


def _name_of(part: object, bus: BusLike) -> str:
    return next((attachment.name for attachment in bus.attachments if attachment.obj is part), type(part).__name__)
