"""Whether a checkpoint fits a Trainer, and what to type if it does not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.plain import decode
from hocket.checkpoints.shapes import Shape, fitting_optimizer_state
from hocket.data.stateful import has_state
from hocket.hookspecs import Event
from hocket.plugins import catalog
from hocket.plugins.errors import PluginError
from hocket.state import State


class ContentError(PluginError, ValueError):
    """A checkpoint that does not fit the Trainer that it is loaded into."""


def class_of(thing: Any) -> str:
    """Return module and name of its class; see `class_named`."""
    return class_named(_full_name(type(thing)))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def class_named(saved: str) -> str:
    """Return the name that checkpoints compare: without the module for core's own classes, which may move between modules."""
    return re.sub(r"^hocket\.([a-z_]+\.)+", "hocket.", saved)


def in_order(numbered: Mapping[str, Any]) -> list[Any]:
    """The values of ``"0"``, ``"1"``, ``"2"`` …"""
    return [numbered[str(index)] for index in range(len(numbered))]


def compare(state: State, tree: Mapping[str, Any], weights: Mapping[str, Shape]) -> list[str]:
    """What does not fit, but for the model, one sentence or two each. Nothing is changed.

    Args:
        weights: the shapes of the checkpoint's weights, also of those that are ignored.
    """
    problems = []
    saved, here = tree["optimizers"], [class_of(optimizer) for optimizer in state.optimizers]
    before = [class_named(each["class"]) for each in in_order(saved)]
    if before != here:
        problems.append(
            f"The checkpoint has the state of {', '.join(before) or 'no optimizer'}, but the Trainer has "
            f"{', '.join(here) or 'none'}. Give the Trainer the same optimizer=."
        )
    for index, each in enumerate(in_order(saved)):
        if index < len(here) and before[index] == here[index]:
            _, problem = fitting_optimizer_state(state, index, decode(each["state"], copy=False), weights)
            problems += [problem] if problem else []
    before = [class_named(each["class"]) for each in in_order(tree["schedules"])]
    here = [class_of(each) for each in state.schedules]
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
        elif (
            name in states
            and (kind, name) in attached
            and class_of(attached[kind, name].obj) != class_named(each["class"])
        ):
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


#: Kinds of which there can be any number; of the others there is always one, which may be another than before. Loggers may be
#: others, too: training does not depend on them.
_SEVERAL = ("algorithms", "callbacks")


def _how_to_get(kind: str, each: Mapping[str, Any]) -> str:
    """What to type for a plug-in that a checkpoint was taken with."""
    short = _short(each["name"])
    if {short, each["name"]} & set(catalog.names(kind)):
        return f"Pass {kind}=['{short}'] to the Trainer."
    if each["dist"] in (None, "this process"):
        return f"Pass an instance of it to the Trainer: {kind}=[{each['class'].rpartition('.')[2]}(…)]."
    return (
        f"It comes with {each['dist']} {each['version']}, which is not installed or switched off; type: "
        f"pip install '{each['dist']}=={each['version']}', and pass {kind}=['{short}'] to the Trainer."
    )


def recorded_algorithms(path: Path | str, every: bool = False) -> list[dict[str, dict[str, Any]]]:
    """The algorithms that a checkpoint was taken with, by name and configuration, as ``Trainer(algorithms=…)`` takes them.

    Args:
        path: the checkpoint's folder or URL; one of weights only will do.
        every: not only those that change what the model is made of, which its weights need (those that act on ``init``).

    Raises:
        ContentError: one is not installed (the message names its distribution), is another class than it was, or was given as
            an instance, whose configuration is not known.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    specifications: list[dict[str, dict[str, Any]]] = []
    from hocket.checkpoints import format as formats
    from hocket.checkpoints.places import local_folder

    with local_folder(path, ["attached"]) as local:
        attached = formats.read(local, only=["attached"])["attached"]
    for each in attached:
        if each["kind"] != "algorithms":
            continue
        short = _short(each["name"])
        name = short if each["dist"] in (None, "this process") else f"{each['dist']}/{short}"
        if short not in catalog.names("algorithms"):
            raise ContentError(f"{path} was taken with the algorithm '{short}'. {_how_to_get('algorithms', each)}")
        found = catalog.find("algorithms", name).load()
        if class_named(_full_name(found)) != class_named(each["class"]):
            raise ContentError(
                f"'{short}' was a {each['class']} when {path} was taken, and is a {_full_name(found)} "
                f"now. Pass an instance of the right one: algorithms=[{each['class'].rpartition('.')[2]}(…)]."
            )
        if not every and Event.INIT not in found.events:
            continue
        if each["config"] is None:
            raise ContentError(
                f"{path} does not say how its algorithm '{short}' was made, because it was given as an instance or with "
                f"arguments that are no plain data. Pass one made alike: algorithms=[{found.__qualname__}(…)]."
            )
        specifications.append({name: decode(each["config"])})
    return specifications


def warn_of_surgery(path: Path | str, state: State) -> None:
    """Warn of algorithms that changed what a checkpoint's model is made of, if it is one of ours, and that are not here."""
    try:
        recorded = recorded_algorithms(path)
    except CheckpointError:
        return
    except ContentError as error:
        warnings.warn(str(error), stacklevel=4)
        return
    here = {_short(voice.name) for voice in state.bus.voices}
    missing = [each for each in recorded if not {name.rpartition("/")[2] for name in each} & here]
    if missing:
        warnings.warn(
            f"The weights of {path} were trained in a model that algorithms had changed, and this Trainer has them not. Unless "
            f"the model is changed already, give it algorithms={missing}.",
            stacklevel=4,
        )


def _short(name: str) -> str:
    """Without the number that the second plug-in of a name gets."""
    return name.rpartition("-")[0] if name.rpartition("-")[2].isdigit() else name
