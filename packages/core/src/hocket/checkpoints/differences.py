"""What a run is configured with, and what of that a resumed run has changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hocket.checkpoints.plain import decode
from hocket.plugins import catalog
from hocket.schedules import Schedule
from hocket.settings import plain

if TYPE_CHECKING:
    from hocket.trainer import Trainer

#: Trainer arguments that affect the weights and are not compared elsewhere when a checkpoint is loaded.
_ARGUMENTS = ("loss", "global_batch", "schedule", "schedule_every", "clip_gradients", "nonfinite", "seed", "overfit")
_ATTACHED = ("algorithms", "callbacks", "precisions", "actions")


def configuration(trainer: Trainer) -> dict[str, Any]:
    """Arguments and the hyperparameters that optimizers were made with, as plain data."""
    given = {name: trainer.settings.given[name] for name in _ARGUMENTS}
    arguments = {name: repr(each) if isinstance(each, Schedule) else repr(plain(each)) for name, each in given.items()}
    return {"arguments": arguments, "optimizers": trainer._hyperparameters}


def hyperparameters(optimizers: list[Any]) -> dict[str, str]:
    """Of every parameter group, as text by its place, such as ``"optimizers.0.lr"``."""
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            place = f"optimizers.{number}" + (f".group{index}" if len(optimizer.param_groups) > 1 else "")
            found |= {f"{place}.{name}": repr(plain(each)) for name, each in group.items() if name != "params"}
    return found


def changed(trainer: Trainer, tree: Mapping[str, Any]) -> list[str]:
    """What differs between a checkpoint's configuration and the Trainer's, as far as both are known."""
    before, now = tree.get("configuration"), configuration(trainer)
    found = list(_plugins(trainer, tree))
    if before is None:  # an older checkpoint
        return found
    found += _different(before["arguments"], now["arguments"], "{} was {}, is {}")
    return found + list(_different(before["optimizers"], now["optimizers"], "{} was and stays {}, not {}"))


def _different(before: Mapping[str, str], now: Mapping[str, str], text: str) -> Iterator[str]:
    for name, value in before.items():
        if now.get(name, value) != value:
            yield text.format(name, value, now[name])


def _plugins(trainer: Trainer, tree: Mapping[str, Any]) -> Iterator[str]:
    voices = trainer.state.bus.voices
    for kind in _ATTACHED:
        there = {each["name"]: each for each in tree["attached"] if each["kind"] == kind}
        here = {voice.name: voice for voice in voices if voice.kind == kind}
        if kind not in ("callbacks", "algorithms") and there.keys() != here.keys():
            yield f"{catalog.singular(kind)} was {', '.join(there)}, is {', '.join(here)}"
        if kind == "algorithms" and there.keys() == here.keys() and list(there) != list(here):
            yield f"the order of algorithms was {', '.join(there)}, is {', '.join(here)}"
        for name, voice in here.items():
            if name not in there or there[name]["config"] is None or voice.instance:
                continue
            then, now = decode(there[name]["config"]), dict(voice.config)
            for option in sorted(then.keys() | now.keys()):
                default = _default(voice.obj, option)
                was, is_now = (plain(each.get(option, default)) for each in (then, now))
                if was != is_now:
                    yield f"{option} of the {catalog.singular(kind)} '{name}' was {was!r}, is {is_now!r}"


def _default(plugin: Any, option: str) -> Any:
    parameter = inspect.signature(type(plugin)).parameters.get(option)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
