"""Module surgery by Composer's names, on hocket's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hocket.errors import WrongState
from hocket.surgery import Policy, replace_modules, update_optimizer


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], Callable[[Any, int], nn.Module | None]],
    optimizers: Optimizer | list[Optimizer] | tuple[Optimizer, ...] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Replace the descendants of a module that a policy returns something for; return new modules by old ones.

    Args:
        module: the module; it is not replaced itself.
        policies: functions of a module and its number, by class.
        optimizers: the optimizers, whose parameter groups follow.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.utils import module_surgery
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> replaced = module_surgery.replace_module_classes(model, {torch.nn.ReLU: lambda old, index: torch.nn.GELU()})
        >>> model
        Sequential(
          (0): GELU(approximate='none')
        )
    """
    replaced = replace_modules(module, {kind: Policy(build) for kind, build in policies.items()})
    given = [] if optimizers is None else optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in given:
        update_optimizer(optimizer, replaced)
    return {each.old: each.new for each in replaced if each.old is not None}


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Return the number of descendants of a class."""
    return sum(isinstance(each, module_class) for each in module.modules() if each is not module)


def update_params_in_optimizer(
    old_params: Iterable[nn.Parameter], new_params: Iterable[nn.Parameter], optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Remove parameters from their group, and add others to it. Raises RuntimeError if they are in several groups."""
    (optimizer,) = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    old = set(old_params)
    groups = [group for group in optimizer.param_groups if not old.isdisjoint(group["params"])]
    if len(groups) > 1:
        raise WrongState("The parameters are in several groups of the optimizer. Update one group at a time.")
    for group in groups:
        kept = [each for each in group["params"] if each not in old]
        group["params"] = [*kept, *(each for each in new_params if not any(each is other for other in kept))]
