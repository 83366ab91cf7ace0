"""A run's configuration, and warnings of differences when a run resumes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.basics.plain_data import decode, json_like
from hocket.optim.groups import hyperparameters as hyperparameters_of
from hocket.plugins import registry
from hocket.schedules import Schedule
from hocket.state.component import Check, Component, Saved, Tree
from hocket.state.state import State

#: Trainer arguments that affect the weights and are not compared elsewhere when a checkpoint is loaded.
_ARGUMENTS = (
    "loss", "batch_transform", "global_batch", "accumulate", "schedule", "schedule_every", "clip_gradients", "nonfinite",
    "seed", "overfit",
)  # fmt: skip
_ATTACHED = ("algorithms", "callbacks", "precisions", "actions")


class Configuration(Component):
    """Arguments and hyperparameters, as plain data. A resumed run warns of differences, and records what is in effect.

    Args:
        arguments: those of the Trainer.
        hyperparameters: the initial ones of the optimizers; see `hocket.optim.groups.hyperparameters`.
    """

    path = "configuration"

    def __init__(self, state: State, arguments: Mapping[str, Any], hyperparameters: Mapping[str, str]) -> None:
        self._state, self._arguments, self._hyperparameters = state, arguments, dict(hyperparameters)
        #: The optimizers' values when the Trainer was made, a checkpoint was loaded or a fit ended.
        self._noted = dict(hyperparameters)

    def state_dict(self, gather: bool) -> Tree:
        """Return both as text."""
        from hocket.basics.masking import masked

        given = {name: self._arguments[name] for name in _ARGUMENTS}
        given["schedule_every"] = given["schedule_every"] or "1ba"
        texts = {
            name: repr(each) if isinstance(each, Schedule) else repr(masked(json_like(each), name))
            for name, each in given.items()
        }
        return {"arguments": texts, "optimizers": self._hyperparameters}

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Warn of every difference that is known on both sides."""
        found = list(_plugins(self._state, checkpoint.tree["attached"]))
        if saved is not None:
            now = self.state_dict(gather=False)
            found += _different(saved["arguments"], now["arguments"], "{} was {}, is {}")
            found += _different(saved["optimizers"], now["optimizers"], "{} was and stays {}, not {}")
        message = (
            f"This run is configured differently from the checkpoint's: {'; '.join(found)}. To continue as before, «give the "
            "Trainer the same arguments as then¦write the same values as then»."
            + (_HOW_TO_CHANGE if any(" and stays " in each for each in found) else "")
        )
        return Check({} if saved is None else saved["optimizers"], warnings=[message] if found else [])

    def absent(self, checkpoint: Saved) -> Check:
        """Compare only the attached plug-ins: older checkpoints record nothing else."""
        return self.check(None, checkpoint)

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Take over the saved hyperparameters that were loaded into the optimizers before."""
        before = self._noted
        self.note()
        loaded = {name for name, value in self._noted.items() if value != before.get(name)}
        self._hyperparameters |= {name: value for name, value in saved.items() if name in loaded}

    def note(self) -> None:
        """Note the optimizers' values, before code of the user can change them."""
        self._noted = self._in_effect()

    def take_changes(self) -> None:
        """Record the hyperparameters that the user has set in the optimizers since `note`. Called before a fit."""
        now, before, self._noted = self._in_effect(), self._noted, {}  # during the fit, plug-ins change them
        self._hyperparameters |= {name: value for name, value in now.items() if value != before.get(name, value)}

    def _in_effect(self) -> dict[str, str]:
        """Return the current hyperparameters, with the learning rate that a schedule begins with."""
        now = hyperparameters_of(self._state.optimizers)
        now = {name: value for name, value in now.items() if not name.endswith(_STATE)}
        return {
            name: now.get(f"{name[:-2]}initial_lr" if name.endswith(".lr") else name, now.get(name, value))
            for name, value in self._hyperparameters.items()
        }


#: What Schedule-Free's optimizers keep beside hyperparameters, and change as they train and evaluate.
_STATE = ".train_mode"
_HOW_TO_CHANGE = (
    "« To change what stays, set it before fit, as in trainer.state.optimizers[0].param_groups[0]['lr'] = 1e-4; with a "
    "schedule set 'initial_lr'.¦ For other values begin a new run: write »«¦resume=None»«¦, and another folder in "
    "checkpoints.»"
)


def _different(before: Mapping[str, str], now: Mapping[str, str], text: str) -> Iterator[str]:
    for name, value in before.items():
        if now.get(name, value) != value:
            yield text.format(name, value, now[name])


def _plugins(state: State, attached: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from hocket.basics.masking import masked

    for kind in _ATTACHED:
        there = {each["name"]: each for each in attached if each["kind"] == kind}
        here = {attachment.name: attachment for attachment in state.bus.attachments if attachment.kind == kind}
        if kind not in ("callbacks", "algorithms") and there.keys() != here.keys():
            yield f"{registry.singular(kind)} was {', '.join(there)}, is {', '.join(here)}"
        if kind == "algorithms" and there.keys() == here.keys() and list(there) != list(here):
            yield f"the order of algorithms was {', '.join(there)}, is {', '.join(here)}"
        for name, attachment in here.items():
            if name not in there or there[name]["config"] is None or attachment.instance:
                continue
            then, now = dict(masked(decode(there[name]["config"]), name)), dict(attachment.config)
            for option in sorted(then.keys() | now.keys()):
                default = _default(attachment.obj, option)
                was, is_now = (json_like(each.get(option, default)) for each in (then, now))
                if was != is_now:
                    yield f"{option} of the {registry.singular(kind)} '{name}' was {was!r}, is {is_now!r}"


def _default(plugin: Any, option: str) -> Any:
    parameter = inspect.signature(type(plugin)).parameters.get(option)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
