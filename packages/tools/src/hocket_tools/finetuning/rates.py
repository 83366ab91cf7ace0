"""The learning rates of stages: parameter groups of an optimizer divided by the stages that give them rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hocket.optim.learning_rate_schedules import Scheduled
from hocket.state.state import State
from hocket_tools.finetuning.stages import Stage


class StageRates:
    """Set the base learning rate of each parameter group in each stage.

    Groups are divided once, before a checkpoint is loaded, so that an optimizer has the same groups in all stages.

    Args:
        optimizers: changed in place: a group whose parameters get rates in different stages becomes several.
        names: the names of all parameters, by their ids.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], stages: Sequence[Stage], names: Mapping[int, list[str]]
    ) -> None:
        self._stages = stages
        #: For each optimizer and group: its own rate, and the numbers of the stages that give it another.
        self._groups: list[list[tuple[float, tuple[int, ...]]]] = [
            _divided(optimizer, stages, names) for optimizer in optimizers
        ]

    def set(self, state: State, begun: Sequence[int]) -> None:
        """Give each group the rate of the last of the stages ``begun`` that has one for it, or its own, times its schedule."""
        changed = False
        for optimizer, groups in zip(state.optimizers, self._groups, strict=True):
            for group, (own, numbers) in zip(optimizer.param_groups, groups, strict=False):
                last = [number for number in numbers if number in begun]
                changed |= _set_base(group, self._stages[last[-1]].rate(own) if last else own)
        for schedule in state.schedules if changed else ():
            if isinstance(schedule, Scheduled):
                schedule.step(state)  # the same time as in its last step


def _divided(
    optimizer: Optimizer, stages: Sequence[Stage], names: Mapping[int, list[str]]
) -> list[tuple[float, tuple[int, ...]]]:
    """Divide the groups of an optimizer by the stages that give rates. New groups come last, as a checkpoint expects them."""
    groups: list[tuple[float, tuple[int, ...]]] = []
    added: list[tuple[dict[str, Any], tuple[int, ...]]] = []
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        parts: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            decide = [stage.has_rate and stage.decides(names.get(id(parameter), []), parameter) for stage in stages]
            parts[tuple(number for number, trains in enumerate(decide) if trains)].append(parameter)
        own = float(group["initial_lr"])
        first, *others = parts or [()]
        group["params"] = parts[first]
        groups.append((own, first))
        added += [({**group, "params": parts[each]}, each) for each in others]
    for options, numbers in added:
        optimizer.add_param_group(options)
        groups.append((float(options["initial_lr"]), numbers))
    return groups


def _set_base(group: dict[str, Any], rate: float) -> bool:
    """Change the base learning rate of a group, and in the same ratio what is computed from it. Return whether it changed."""
    base = float(group["initial_lr"])
    if base == rate:
        return False
    for key, value in group.items():
        if not key.endswith("lr") or not isinstance(value, int | float | Tensor):  # also base_lr, max_lr, min_lr
            continue
        scaled = rate if float(value) == base or not base else rate * (float(value) / base)
        if isinstance(value, Tensor):  # compiled and captured optimizers keep the rate on the device
            value.fill_(scaled)
        else:
            group[key] = scaled
    return True
