"""Whether a checkpoint's weights and optimizer state have the names and shapes of a Trainer's, before any is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from hocket.state import State

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What did not fit: names that the module has and the weights have not, the reverse, and names with two shapes."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Name, shape in the weights, shape in the module."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"missing from the weights: {some(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the module: {some(self.unexpected)}")
        if self.mismatched:
            shapes = [f"{name} ({list(given)}, the module has {list(own)})" for name, given, own in self.mismatched]
            lines.append(f"of another shape: {some(shapes)}")
        return "\n".join(lines) or "everything fits"


def some(names: Sequence[str], most: int = 20) -> str:
    """List the first names, and say how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape]:
    """By name; without what is no tensor."""
    return {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}


def misfit_of_model(state: State, saved: Mapping[str, Any]) -> str:
    """How the saved weights differ from the model's, and what to type; empty if they have the same names and shapes."""
    here = state.bus.model_shards(state.prepared)
    before, now = shapes_of(saved), shapes_of(here)
    left_alone = _with_ways_of_their_own(state.task)

    def told(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(left_alone))

    other = told(name for name in before if before[name] != now.get(name, before[name]))
    report = Report(
        told(name for name in here if name not in saved),
        told(name for name in saved if name not in here),
        tuple((name, before[name], now[name]) for name in other),
    )
    if not report:
        return ""
    paths = [f"model.{name}" for name in (*report.missing, *report.unexpected, *other)]
    told_how = str(report).replace("\n", "; ")
    return (
        f"The model is not the checkpoint's: {told_how}. Give the Trainer the model that was trained, or leave these out: "
        f"ignore={_listed(paths)}."
    )


def _with_ways_of_their_own(task: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names in modules that themselves decide what they load, such as buffers of any size."""
    found = []
    for name, module in task.named_modules():
        hooks = module._load_state_dict_pre_hooks.values()
        own = not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        if own or not all(getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks):
            found.append(f"{name}." if name else "")
    return tuple(found)


def fitting_optimizer_state(
    state: State, index: int, saved: Mapping[str, Any], weights: Mapping[str, Shape]
) -> tuple[Mapping[str, Any] | None, str]:
    """What of its saved state an optimizer can take, or None; and what it cannot take, with what to type, or nothing.

    Args:
        index: which of the Trainer's optimizers.
        weights: the shapes of the weights that it was saved with.
    """
    optimizer = state.optimizers[index]
    own = state.bus.optimizer_shards(state.prepared, optimizer)
    if not all(isinstance(each.get("state"), Mapping) and "param_groups" in each for each in (saved, own)):
        return saved, ""  # of a form that only the optimizer itself knows
    kind = type(optimizer).__name__
    before, now = _numbers(saved), _numbers(own)
    if (sizes := [len(group) for group in before]) != [len(group) for group in now]:
        return None, (
            f"The checkpoint's {kind} has groups of {sizes} parameters, and the Trainer's has {[len(group) for group in now]}. "
            "Give the Trainer the same optimizer= and model, or leave the optimizer's state out: ignore=['optimizers.*']."
        )
    names = {id(parameter): name for name, parameter in state.task.named_parameters()}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
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
        f"ignore={_listed([f'optimizers.{index}.state.state.~int.{number}.*' for number in misfits])}, and with all, "
        "ignore=['optimizers.*']."
    )


def _numbers(saved: Mapping[str, Any]) -> list[list[Any]]:
    return [group["params"] for group in saved["param_groups"]]


def _kept(values: Any) -> set[Shape]:
    """Shapes of what an optimizer keeps for a parameter, without single numbers."""
    tensors = values.values() if isinstance(values, Mapping) else ()
    return {tuple(each.shape) for each in tensors if isinstance(each, Tensor) and each.ndim}


def _listed(paths: list[str], most: int = 6) -> str:
    shown = [f"'{path}'" for path in paths[:most]]
    return f"[{', '.join([*shown, '…'] if len(paths) > most else shown)}]"
