"""Optimizers with their state for each parameter, and the learning-rate schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from hocket.basics.plain_data import encode
from hocket.state.component import Check, Component, Like, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.classes import class_named, class_of
from hocket_checkpoints.weight_differences import Shape, listed

#: The path of an optimizer's state for a parameter.
_OF_PARAMETER = re.compile(r"(\d+)\.state\.state\.~int\.(\d+)\.")


class Optimizers(Component):
    """All optimizers, by number."""

    path = "optimizers"

    def __init__(self, state: State) -> None:
        self._state = state
        #: The number of parameter groups that each optimizer was made with.
        self._groups = [len(each.param_groups) for each in state.optimizers]

    def state_dict(self, gather: bool) -> Tree:
        """Class and state of each, and the names of parameters in groups that were added since."""
        state, bus = self._state, self._state.bus
        state_of = bus.optimizer_state if gather else bus.optimizer_shards
        return {
            str(index): {
                "class": class_of(each),
                "state": encode(state_of(state.prepared, each), "the optimizer", gather),
                **({} if name.isdecimal() else {"name": name}),
                **({"added": added} if (added := self._added(index)) else {}),
            }
            for index, (name, each) in enumerate(zip(state.optimizer_names, state.optimizers, strict=True))
        }

    def _added(self, index: int) -> list[list[str]]:
        groups = self._state.optimizers[index].param_groups[self._groups[index] :]
        names = {id(parameter): name for name, parameter in self._state.task.named_parameters()} if groups else {}
        return [[names.get(id(parameter), "") for parameter in group["params"]] for group in groups]

    def _to_add(self, index: int, saved: Mapping[str, Any]) -> list[list[Tensor]]:
        """Return the parameters of the groups that the checkpoint's optimizer has and this one has not been given yet.

        Returns none if they are not this model's, or in this optimizer already: then the groups differ, which is a problem.
        """
        optimizer, added = self._state.optimizers[index], saved.get("added", [])
        missing = len(saved["state"].get("param_groups", ())) - len(optimizer.param_groups)
        if not added or missing != len(added):
            return []
        parameters = dict(self._state.task.named_parameters())
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = [name for group in added for name in group]
        if any(name not in parameters or id(parameters[name]) in held for name in names):
            return []
        return [[parameters[name] for name in group] for group in added]

    def like(self) -> Like:
        """Return for each tensor of state the parameter that it belongs to, whose sharding it has."""
        parameters: list[list[Tensor]] = [
            [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self._state.optimizers
        ]

        def like(path: str, reference: dict[str, Any]) -> Tensor | None:
            if not (found := _OF_PARAMETER.match(path)):
                return None
            optimizer, index = map(int, found.groups())
            try:
                return parameters[optimizer][index]
            except IndexError:  # of another optimizer, which `check` refuses
                return None

        return like

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Compare classes, and for each optimizer of the same class the parameters with state."""
        state, problems, states = self._state, [], []
        before, here = _classes(saved), [class_of(optimizer) for optimizer in state.optimizers]
        if before != here:
            problems.append(
                f"The checkpoint has the state of {', '.join(before) or 'no optimizer'}, but the Trainer has "
                f"{', '.join(here) or 'none'}. Give the Trainer the same «optimizer=»."
            )
        names = [each.get("name") for each in in_order(saved)]
        if all(names) and before == here and names != state.optimizer_names:
            problems.append(
                f"The checkpoint has the optimizers {', '.join(map(repr, names))} in this order, and the Trainer "
                f"{', '.join(map(repr, state.optimizer_names))}. Give them the same names in the same order."
            )
            return Check([(None, [])] * len(names), problems)
        for index, each in enumerate(in_order(saved)):
            fitting, added = None, list[list[Tensor]]()
            if index < len(here) and before[index] == here[index]:
                decoded = checkpoint.decode(each["state"])
                added = self._to_add(
                    index, {**each, "state": decoded} if isinstance(decoded, Mapping) else {"state": {}}
                )
                fitting, problem = _fitting(state, index, decoded, checkpoint.weights, added)
                problems += [problem] if problem else []
            states.append((fitting, added))
        return Check(states, problems)

    def load_state_dict(self, saved: list[Any]) -> None:
        """Add the groups that were added before, and load each; None leaves the optimizer as it is."""
        state = self._state
        for optimizer, (each, added) in zip(state.optimizers, saved, strict=False):
            if each is not None:
                for parameters in added:
                    optimizer.add_param_group({"params": parameters})
                state.bus.load_optimizer_state(state.prepared, optimizer, each)


class Schedules(Component):
    """All schedules, by number."""

    path = "schedules"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Class and state of each."""
        return {
            str(index): {"class": class_of(each), "state": encode(each.state_dict(), "the schedule")}
            for index, each in enumerate(self._state.schedules)
        }

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Compare classes."""
        before, here = _classes(saved), [class_of(each) for each in self._state.schedules]
        states = [checkpoint.decode(each["state"]) for each in in_order(saved)]
        fitting = [each if kind == own else None for each, kind, own in zip(states, before, here, strict=False)]
        if before == here:
            return Check(fitting)
        return Check(
            fitting,
            [
                f"The checkpoint has {len(before)} schedules ({', '.join(before)}), the Trainer {len(here)} "
                f"({', '.join(here)}). Give the Trainer the same «schedule=»."
            ],
        )

    def load_state_dict(self, saved: list[Any]) -> None:
        """Load each; None leaves the schedule as it is."""
        for schedule, each in zip(self._state.schedules, saved, strict=False):
            if each is not None:
                schedule.load_state_dict(each)


def in_order(numbered: Mapping[str, Any]) -> list[Any]:
    """Return the values of ``"0"``, ``"1"``, ``"2"`` …"""
    return [numbered[str(index)] for index in range(len(numbered))]


def _classes(saved: Tree) -> list[str]:
    return [class_named(each["class"]) for each in in_order(saved)]


def _fitting(
    state: State, index: int, saved: Mapping[str, Any], weights: Mapping[str, Shape], added: Sequence[Sequence[Tensor]]
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the part of its saved state that an optimizer can load, or None; and the problem and what to type, or empty.

    Args:
        index: the number of the Trainer's optimizer.
        weights: the shapes of the saved weights.
        added: the parameters of groups that will be added to the optimizer.
    """
    optimizer = state.optimizers[index]
    own = state.bus.optimizer_shards(state.prepared, optimizer)
    if not all(isinstance(each.get("state"), Mapping) and "param_groups" in each for each in (saved, own)):
        return saved, ""  # in a format that only the optimizer itself knows
    kind = type(optimizer).__name__
    before, now = _numbers(saved), [*_numbers(own), *([None] * len(group) for group in added)]
    if (sizes := [len(group) for group in before]) != [len(group) for group in now]:
        return None, (
            f"The checkpoint's {kind} has groups of {sizes} parameters, and the Trainer's has {[len(group) for group in now]}. "
            "Give the Trainer the same «optimizer=» and model«, or omit the optimizer's state by "
            "trainer.load_state_dict(tree, ignore=['optimizers.*'])¦»."
        )
    names = {id(parameter): name for name, parameter in state.task.named_parameters()}
    parameters = chain.from_iterable([*(group["params"] for group in optimizer.param_groups), *added])
    misfits: dict[Any, str] = {}
    for number, own_number, parameter in zip(chain(*before), chain(*now), parameters, strict=False):
        name, found = names.get(id(parameter)), _kept(saved["state"].get(number))
        if name is None or not found or weights.get(name) == parameter.shape:
            continue
        if found.isdisjoint({tuple(parameter.shape), *_kept(own["state"].get(own_number))}):
            misfits[number] = name
    if not misfits:
        return saved, ""
    rest = {number: values for number, values in saved["state"].items() if number not in misfits}
    return {**saved, "state": rest}, (
        f"The checkpoint's {kind} has state of other shapes for {', '.join(misfits.values())}. To begin anew with these, pass "
        f"«ignore={listed([f'optimizers.{index}.state.state.~int.{number}.*' for number in misfits])}»; with all, "
        "ignore=['optimizers.*']."
    )


def _numbers(saved: Mapping[str, Any]) -> list[list[Any]]:
    return [group["params"] for group in saved["param_groups"]]


def _kept(values: Any) -> set[Shape]:
    """Return the shapes of an optimizer's state for a parameter, without 0-dimensional tensors."""
    tensors = values.values() if isinstance(values, Mapping) else ()
    return {tuple(each.shape) for each in tensors if isinstance(each, Tensor) and each.ndim}
