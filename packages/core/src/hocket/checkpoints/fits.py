"""Whether a checkpoint fits a Trainer, and what to type if it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.data.sources import has_state
from hocket.plugins import catalog
from hocket.plugins.errors import PluginError
from hocket.state import State


class ContentError(PluginError, ValueError):
    """A checkpoint that does not fit the Trainer that it is loaded into."""


def class_of(thing: Any) -> str:
    """Module and name of its class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def in_order(numbered: Mapping[str, Any]) -> list[Any]:
    """The values of ``"0"``, ``"1"``, ``"2"`` …"""
    return [numbered[str(index)] for index in range(len(numbered))]


def compare(state: State, tree: Mapping[str, Any]) -> list[str]:
    """What does not fit, one sentence or two each."""
    problems = []
    saved, here = tree["optimizers"], [class_of(optimizer) for optimizer in state.optimizers]
    before = [each["class"] for each in in_order(saved)]
    if before != here:
        problems.append(
            f"The checkpoint has the state of {', '.join(before) or 'no optimizer'}, but the Trainer has "
            f"{', '.join(here) or 'none'}. Give the Trainer the same optimizer=."
        )
    before, here = [each["class"] for each in in_order(tree["schedules"])], [class_of(each) for each in state.schedules]
    if before != here:
        problems.append(
            f"The checkpoint has {len(before)} schedules ({', '.join(before)}), the Trainer {len(here)} "
            f"({', '.join(here)}). Give the Trainer the same schedule=."
        )
    attached = {(voice.kind, voice.name): voice for voice in state.bus.voices}
    described = {(each["kind"], each["name"]): each for each in tree["attached"]}
    for (kind, name), each in described.items():
        states = tree["plugins"].get(kind, {})
        if (kind, name) not in attached and (kind == "algorithms" or (kind in _SEVERAL and name in states)):
            problems.append(
                f"The checkpoint was taken with the {catalog.singular(kind)} '{name}' ({each['class']}), which is not "
                f"attached. {_how_to_get(kind, each)}"
            )
        elif name in states and (kind, name) in attached and class_of(attached[kind, name].obj) != each["class"]:
            problems.append(
                f"'{name}' is a {each['class']} in the checkpoint and a {class_of(attached[kind, name].obj)} here. Attach the "
                f"same {kind}, in the same order."
            )
    for (kind, name), voice in attached.items():
        keeps = kind in _SEVERAL and has_state(voice.obj) and bool(voice.obj.state_dict())
        if (kind, name) not in described and (kind == "algorithms" or keeps):
            problems.append(
                f"The {catalog.singular(kind)} '{name}' is attached, but the checkpoint was taken without it. Leave it out."
            )
    return problems


#: Kinds of which there can be any number; of the others there is always one, which may be another than before.
_SEVERAL = ("algorithms", "callbacks", "loggers")


def _how_to_get(kind: str, each: Mapping[str, Any]) -> str:
    """What to type for a plug-in that a checkpoint was taken with."""
    short = each["name"].rpartition("-")[0] if each["name"].rpartition("-")[2].isdigit() else each["name"]
    if {short, each["name"]} & set(catalog.names(kind)):
        return f"Pass {kind}=['{short}'] to the Trainer."
    if each["dist"] in (None, "this process"):
        return f"Pass an instance of it to the Trainer: {kind}=[{each['class'].rpartition('.')[2]}(…)]."
    return (
        f"It comes with {each['dist']} {each['version']}, which is not installed or switched off; type: "
        f"pip install '{each['dist']}=={each['version']}', and pass {kind}=['{short}'] to the Trainer."
    )
