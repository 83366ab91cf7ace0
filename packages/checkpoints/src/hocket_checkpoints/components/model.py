"""The model's weights, its frozen parameters and its modules in eval mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hocket.basics.plain_data import decode, encode
from hocket.state.component import Check, Component, Like, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.weight_differences import Report, listed, shapes_of


class Model(Component):
    """The model's weights, by the task's names."""

    path = "model"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return full weights with ``gather``, else this rank's shards."""
        bus = self._state.bus
        weights = (bus.model_state if gather else bus.model_shards)(self._state.prepared)
        return encode(dict(weights), "the model", gather)

    def like(self) -> Like:
        """Return the model's current shards by path."""
        shards = self._state.bus.model_shards(self._state.prepared)
        return lambda path, reference: shards.get(path)

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Compare names and shapes; with ``strict=False`` load the weights that fit and keep the model's own for the others."""
        weights: dict[str, Any] = decode(saved, copy=False)  # loading copies them
        if omitted := checkpoint.tree.get("omitted"):
            own = self._state.bus.model_shards(self._state.prepared)
            weights = {**{name: own[name] for name in omitted if name in own}, **weights}
        if checkpoint.strict:
            misfit = _misfit(self._state, weights)
            return Check(weights, [misfit] if misfit else [])
        here: dict[str, Any] = dict(self._state.bus.model_state(self._state.prepared))
        fitting = {
            name: value
            for name, value in weights.items()
            if name in here and getattr(value, "shape", None) == getattr(here[name], "shape", None)
        }
        skipped, missing = sorted(weights.keys() - fitting.keys()), sorted(here.keys() - fitting.keys())
        message = (
            f"The model's weights: {len(fitting)} loaded; skipped in the checkpoint: {', '.join(skipped) or 'none'}; unchanged "
            f"in the model: {', '.join(missing) or 'none'}."
        )
        return Check({**here, **fitting}, warnings=[message] if skipped or missing else [])

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load full weights or shards."""
        self._state.bus.load_model_state(self._state.prepared, saved)


class Modes(Component):
    """Which parameters are frozen, and which modules are in eval mode."""

    path = "modes"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return the names of both."""
        return {
            "frozen": [name for name, each in self._state.task.named_parameters() if not each.requires_grad],
            "eval": [name for name, each in self._state.task.named_modules() if not each.training],
        }

    def load_state_dict(self, saved: Mapping[str, list[str]]) -> None:
        """Freeze parameters and set the modes of modules as saved."""
        frozen, evaluating = set(saved["frozen"]), set(saved["eval"])
        for name, parameter in self._state.task.named_parameters():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
        for name, module in self._state.task.named_modules():
            module.training = name not in evaluating


def _misfit(state: State, saved: Mapping[str, Any]) -> str:
    """Return how the saved weights differ from the model's, and what to type; empty if names and shapes are the same."""
    here = state.bus.model_shards(state.prepared)
    before, now = shapes_of(saved), shapes_of(here)
    custom = _prefixes_with_custom_loading(state.task)

    def compared(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(custom))

    other = compared(name for name in before if before[name] != now.get(name, before[name]))
    report = Report(
        compared(name for name in here if name not in saved),
        compared(name for name in saved if name not in here),
        tuple((name, before[name], now[name]) for name in other),
    )
    if not report:
        return ""
    paths = [f"model.{name}" for name in (*report.missing, *report.unexpected, *other)]
    differences = str(report).replace("\n", "; ")
    return (
        f"The model is not the checkpoint's: {differences}. Give the Trainer the model that was trained«, or omit these by "
        f"ignore={listed(paths)}¦»."
    )


def _prefixes_with_custom_loading(task: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of modules with custom loading, such as of buffers of any size."""
    found = []
    for name, module in task.named_modules():
        hooks = module._load_state_dict_pre_hooks.values()
        own = not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        if own or not all(getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks):
            found.append(f"{name}." if name else "")
    return tuple(found)
