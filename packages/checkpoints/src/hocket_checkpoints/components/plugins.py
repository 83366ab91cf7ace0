"""The attached plug-ins: their descriptions and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hocket.basics.masking import masked
from hocket.basics.plain_data import decode, encode
from hocket.data.stateful import has_state
from hocket.help.ours import is_ours
from hocket.hookspecs.attachment import Attachment
from hocket.plugins import registry
from hocket.state.component import Check, Component, Like, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.classes import class_named, class_of
from hocket_checkpoints.components.generic import Decoded
from hocket_checkpoints.content import LEFT_OUT

#: Kinds with any number of plug-ins. Of other kinds there is always one, which may differ from the saved one. Loggers may
#: differ too, because training does not depend on them.
_SEVERAL = ("algorithms", "callbacks")


class Plugins(Component):
    """State of plug-ins by kind and name; plug-ins without any are omitted."""

    path = "plugins"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return the state of each plug-in that has some."""
        states: dict[str, dict[str, Any]] = {}
        for attachment in self._state.bus.attachments:
            if has_state(attachment.obj) and (state := attachment.obj.state_dict()):
                states.setdefault(attachment.kind, {})[attachment.name] = encode(
                    state, f"{registry.singular(attachment.kind)} '{attachment.name}'", gather
                )
        return states

    def like(self) -> Like:
        """Return the parameter whose name ends the path: plug-ins name sharded tensors by the parameter with that sharding."""
        state = self._state
        named = dict([*state.model.named_parameters(), *state.prepared.named_parameters()])

        def like(path: str, reference: dict[str, Any]) -> Tensor | None:
            if "pieces" not in reference:
                return None
            names = path.split(".")
            return next((named[name] for n in range(len(names)) if (name := ".".join(names[n:])) in named), None)

        return like

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Compare the plug-ins attached now with those attached then."""
        attached = {(attachment.kind, attachment.name): attachment for attachment in self._state.bus.attachments}
        fitting = {
            (kind, name): checkpoint.decode(saved[kind][name])
            for (kind, name), attachment in attached.items()
            if saved.get(kind, {}).get(name) is not None and has_state(attachment.obj)
        }
        return Check(fitting, _problems(attached, checkpoint.tree["attached"], saved))

    def load_state_dict(self, saved: Mapping[tuple[str, str], Any]) -> None:
        """Load each, in order of attachment."""
        for attachment in self._state.bus.attachments:
            if (attachment.kind, attachment.name) in saved:
                attachment.obj.load_state_dict(saved[attachment.kind, attachment.name])


class Costs(Decoded):
    """What ``profile_plugins=True`` has counted so far."""

    path = "costs"

    def __init__(self, state: State) -> None:
        self._bus = state.bus

    def state_dict(self, gather: bool) -> Tree:
        """Return calls and seconds by plug-in and hook."""
        return [[*key, *counts] for key, counts in self._bus.account.items()] if self._bus.profile else []

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which have none."""
        return Check()

    def load_state_dict(self, saved: Sequence[Any]) -> None:
        """Continue to count from there."""
        for plugin, hook, *counts in saved if self._bus.profile else ():
            self._bus.account.setdefault((plugin, hook), counts)[:] = counts  # calls add to this list


def _problems(
    attached: Mapping[tuple[str, str], Attachment], then: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> list[str]:
    problems = []
    described = {(each["kind"], each["name"]): each for each in then}
    for (kind, name), each in described.items():
        states = saved.get(kind, {})
        left_out = kind in _SEVERAL and name in states and not LEFT_OUT.get()
        if (kind, name) not in attached and (kind == "algorithms" or left_out):
            problems.append(
                f"The checkpoint was taken with the {registry.singular(kind)} '{name}' ({each['class']}), which is not "
                f"attached. {how_to_get(kind, each)}"
            )
        elif name in states and (now := attached.get((kind, name))) and class_of(now.obj) != class_named(each["class"]):
            problems.append(
                f"'{name}' is a {each['class']} in the checkpoint and a {class_of(now.obj)} here. Attach the "
                f"same {kind}, in the same order."
            )
    for (kind, name), attachment in attached.items():
        keeps = kind in _SEVERAL and has_state(attachment.obj) and bool(attachment.obj.state_dict())
        if (kind, name) not in described and (kind == "algorithms" or keeps):
            problems.append(
                f"The {registry.singular(kind)} '{name}' is attached, but the checkpoint was taken without it. Remove it."
            )
    return problems


def how_to_get(kind: str, each: Mapping[str, Any]) -> str:
    """Return what to type to attach a plug-in that a checkpoint was taken with."""
    short, config = short_name(each["name"]), masked(decode(each.get("config") or {}), each["name"])
    given = f"«{kind}={[{short: config} if config else short]!r}»"
    if {short, each["name"]} & set(registry.names(kind)):
        return f"Pass {given} to the Trainer."
    if each["dist"] in (None, "this process"):
        return f"Pass an instance of it to the Trainer: {kind}=[{each['class'].rpartition('.')[2]}(…)]."
    from hocket.help import installing

    extra = registry.extra_of(kind, short)
    if is_ours(each["class"]) and extra is not None:
        what = f"a package of hocket that is not installed; type: {installing.command(extra)}"
    else:
        what = (
            f"{each['dist']} {each['version']}, which is not installed or switched off; if you trust it, type: "
            f"{installing.library(each['dist'], '==' + each['version'])}"
        )
    without = (
        "To resume without its state, call trainer.load_state_dict(hocket.checkpoints.format.read(PATH), "
        f"ignore=['plugins.{kind}.{each['name']}'])."
    )
    return f"It comes with {what}; and pass {given} to the Trainer. {without if kind != 'algorithms' else ''}".rstrip()


def short_name(name: str) -> str:
    """Return the name without the number that the second plug-in of a name gets."""
    return name.rpartition("-")[0] if name.rpartition("-")[2].isdigit() else name


def described(attachments: tuple[Attachment, ...]) -> list[dict[str, Any]]:
    """Return descriptions of attached plug-ins. A configuration that is unknown or not plain data is None."""
    return [
        {
            "kind": attachment.kind,
            "name": attachment.name,
            "class": class_of(attachment.obj),
            "dist": attachment.dist,
            "version": attachment.version,
            "config": _config(attachment),
        }
        for attachment in attachments
    ]


def _config(attachment: Attachment) -> Any:
    try:
        return None if attachment.instance else encode(dict(attachment.config))
    except TypeError:
        return None
