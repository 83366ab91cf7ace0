"""State that no ``state_dict`` of the model holds: non-persistent buffers, and objects that save themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.basics.dtensors import local
from hocket.basics.plain_data import encode
from hocket.help import warn
from hocket.hookspecs.algorithm import Algorithm
from hocket.hookspecs.callback import Callback
from hocket.state.component import Check, Component, PerRank, Saved, Tree
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.state.state import State


class HiddenState(Component):
    """Non-persistent buffers that training changed, and what the loss, transforms and attributes of the model keep.

    From the latter: buffers of modules that are not in the model, and objects with ``state_dict`` and ``load_state_dict``.
    Each rank has its own; a new rank takes that of rank 0.
    """

    path, scope = "hidden", "rank"

    def __init__(self, state: State) -> None:
        self._state = state
        self._constructed: dict[str, Any] = {}
        if buffers := [*_non_persistent(state)]:
            from hocket_checkpoints.reachable_state import fingerprint

            self._constructed = {name: fingerprint(each[key]) for name, each, key in buffers}
        #: The names of buffers that a checkpoint held, which training had changed before.
        self._restored: set[str] = set()
        #: The names of objects whose state cannot be saved.
        self._refused: set[str] = set()

    def state_dict(self, gather: bool) -> Tree:
        """Return tensors and states by name."""
        from hocket_checkpoints.reachable_state import fingerprint, same

        buffers = {}
        for name, each, key in _non_persistent(self._state):
            before = self._constructed.get(name)
            if name in self._restored or before is None or not same(before, fingerprint(each[key])):
                buffers[name] = each[key]
        modules, objects = reached(self._state)
        buffers |= {name: each[key] for name, each, key in _buffers_of(modules)}
        found = {name: tensor if tensor is None else local(tensor) for name, tensor in buffers.items()}
        states: dict[str, Any] = {"buffers": encode(found, "buffers", gather)} if found else {}
        saved = {
            name: state for name, each in objects.items() if (state := self._encoded(name, each, gather)) is not None
        }
        return states | ({"objects": saved} if saved else {})

    def _encoded(self, name: str, each: Any, gather: bool) -> Tree:
        try:
            return encode(each.state_dict(), f"state_dict() of {name}", gather)
        except TypeError as error:
            if name not in self._refused:
                warn(f"Checkpoints do not hold the state of {name}: {error}")
            self._refused.add(name)
            return None

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        """Report what has no counterpart here."""
        states = checkpoint.decode(saved.own or {})
        modules, objects = reached(self._state)
        here = {*_places(self._state, modules), *objects}
        missing = [name for part in states.values() for name in part if name not in here]
        problems = [
            f"The checkpoint has the state of {name}, and nothing here takes it. Give the Trainer the model, loss and "
            "transforms of the run that it continues."
            for name in missing
        ]
        return Check(states, problems)

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which have none."""
        return Check()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore buffers and objects."""
        modules, objects = reached(self._state)
        places = _places(self._state, modules)
        self._restored = set(saved.get("buffers", ()))
        for name, value in saved.get("buffers", {}).items():
            if name in places:
                buffers, key = places[name]
                buffers[key] = _filled(buffers[key], value, self._state.device)
        for name, value in saved.get("objects", {}).items():
            if name in objects:
                objects[name].load_state_dict(value)


Buffers = dict[str, Tensor | None]


def known(state: State) -> set[int]:
    """Return the ids of objects whose state checkpoints hold: the model's tensors, metrics that were logged, optimizers."""
    sets = [each.metrics for each in state.eval_sets.values()] + ([state.step.metrics] if state.step.metrics else [])
    metrics = [each for each in state.task.modules() if state.aggregates.logs(each)]
    metrics += [each for one in sets for each in one.objects]
    metrics = [part for each in metrics for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    saved = [*state.task.parameters(), *state.task.buffers(), *metrics, *state.optimizers, *state.schedules]
    return {*map(id, saved)}


def roots(state: State) -> list[tuple[str, Any]]:
    """Return what computes a batch, by name."""
    task = state.task
    found: list[tuple[str, Any]] = [("loss", task.loss_function)] if isinstance(task, SupervisedTask) else []
    found += [("batch_transform", each) for each in transforms(state)]
    return [*found, (type(state.model).__name__, state.model), (type(task).__name__, task)]


def transforms(state: State) -> list[Any]:
    """Return the functions of ``batch_transform=``."""
    return [f for each in state.bus.attachments for f in getattr(each.obj, "batch_transforms", ())]


def saves_itself(value: Any) -> bool:
    """Whether the class of an object, other than one of torch's, defines ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    if isinstance(value, Optimizer) or kind.__module__.startswith("torch"):
        return False
    methods = (getattr(kind, "state_dict", None), getattr(kind, "load_state_dict", None))
    return all(map(callable, methods)) and methods[0] not in (Callback.state_dict, Algorithm.state_dict)


def reached(state: State) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Return the modules that are not in the task, and the objects that save themselves, by name."""
    from hocket_checkpoints.reachable_state import walk

    inside, modules, objects = {*map(id, state.task.modules())}, dict[str, nn.Module](), dict[str, Any]()

    def enter(name: str, value: Any) -> bool:
        found: dict[str, Any] | None = objects if saves_itself(value) else None
        if isinstance(value, nn.Module):
            found = modules if id(value) not in inside else None
        if found is not None:
            others = sum(each.partition("~")[0] == name for each in found)
            found[f"{name}~{others + 1}" if others else name] = value
        return found is not objects

    for _ in walk(roots(state), known(state), enter):
        pass
    return modules, objects


def _non_persistent(state: State) -> Iterator[tuple[str, Buffers, str]]:
    """Yield name, dict and key of the task's buffers that are not in its ``state_dict``."""
    for path, module in state.task.named_modules():
        if module._non_persistent_buffers_set and not state.aggregates.logs(module):
            for key in sorted(module._non_persistent_buffers_set):
                yield f"{path}.{key}".removeprefix("."), module._buffers, key


def _buffers_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Buffers, str]]:
    for path, module in modules.items():
        yield from ((f"{path}.{key}", module._buffers, key) for key in module._buffers)


def _places(state: State, modules: Mapping[str, nn.Module]) -> dict[str, tuple[Buffers, str]]:
    return {name: (each, key) for name, each, key in (*_non_persistent(state), *_buffers_of(modules))}


@torch.no_grad()
def _filled(buffer: Tensor | None, value: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the buffer with this value, the same object if its shape allows that."""
    if buffer is None or value is None or buffer.shape != value.shape or buffer.layout != value.layout:
        return value if value is None else value.to(device if buffer is None else buffer.device)
    try:
        local(buffer).copy_(value)
    except RuntimeError:  # elements that share memory
        return value.to(buffer.device)
    return buffer
