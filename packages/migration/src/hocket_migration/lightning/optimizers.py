"""What ``configure_optimizers`` returns: its six forms as optimizers and schedulers, and when the schedulers step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hocket.errors import WrongType, WrongValue
from hocket.help import warn

_FORMS = (
    "an optimizer; a list of optimizers; ([optimizers], [schedulers]); {'optimizer': …, 'lr_scheduler': …, 'monitor': …}; a "
    "list of such dicts; or None"
)


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps, under the names that Lightning gives them."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def parse(returned: Any, automatic: bool, kind: str) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers that ``configure_optimizers`` of a module named ``kind`` returned.

    Raises:
        TypeError: it has none of the six forms.
        ValueError: a scheduler's arguments are invalid, or automatic optimization has several optimizers.
    """
    optimizers, schedulers, monitor = _parts(returned, kind)
    optimizers = [getattr(each, "_optimizer", each) for each in optimizers]  # Lightning's wrappers
    if automatic and len(optimizers) > 1:
        raise WrongValue(
            f"configure_optimizers() of {kind} returned {len(optimizers)} optimizers, and automatic optimization has one. Set "
            "self.automatic_optimization = False and step them in training_step."
        )
    configs = [_config(each, monitor, automatic, kind) for each in schedulers]
    for config in configs:
        its = getattr(config.scheduler, "optimizer", None)
        if its is not None and its not in optimizers:
            raise WrongValue(
                f"configure_optimizers() of {kind} returned the scheduler {type(config.scheduler).__name__} of an optimizer "
                "that it did not return. Return both."
            )
    return optimizers, configs


def _parts(given: Any, kind: str) -> tuple[list[Any], list[Any], str | None]:
    if given is None:
        return [], [], None
    if _is_optimizer(given):
        return [given], [], None
    if isinstance(given, Mapping):
        _check_keys(given, kind)
        schedulers = [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
        return [given["optimizer"]], schedulers, given.get("monitor")
    if isinstance(given, Sequence):
        if len(given) == 2 and isinstance(given[0], list | tuple) and all(map(_is_optimizer, given[0])):
            schedulers = list(given[1]) if isinstance(given[1], list | tuple) else [given[1]]
            return list(given[0]), schedulers, None
        if given and all(isinstance(each, Mapping) for each in given):
            for each in given:
                _check_keys(each, kind)
            schedulers = []
            for each in given:
                if each.get("lr_scheduler") is not None:
                    scheduler = each["lr_scheduler"]
                    config = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
                    if each.get("monitor") is not None:
                        config.setdefault("monitor", each["monitor"])
                    schedulers.append(config)
            return [each["optimizer"] for each in given], schedulers, None
        if all(map(_is_optimizer, given)):
            return list(given), [], None
    raise WrongType(
        f"configure_optimizers() of {kind} returned {type(given).__name__}, which is none of its forms. Return {_FORMS}."
    )


def _is_optimizer(given: Any) -> bool:
    return isinstance(given, Optimizer) or isinstance(getattr(given, "_optimizer", None), Optimizer)


def _check_keys(given: Mapping[str, Any], kind: str) -> None:
    if not _is_optimizer(given.get("optimizer")):
        raise WrongType(
            f"configure_optimizers() of {kind} returned a dict without an optimizer at 'optimizer'; its keys are "
            f"{', '.join(map(repr, given)) or 'none'}. Return {_FORMS}."
        )
    if unknown := given.keys() - {"optimizer", "lr_scheduler", "monitor"}:
        warn(
            f"configure_optimizers() of {kind} returned a dict with {', '.join(map(repr, sorted(unknown)))}, without effect."
        )


def _config(given: Any, monitor: str | None, automatic: bool, kind: str) -> SchedulerConfig:
    values = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    known = set(SchedulerConfig.__dataclass_fields__)
    if unknown := values.keys() - known:
        warn(
            f"The scheduler of {kind} has the keys {', '.join(map(repr, sorted(unknown)))}, which are not used. Known are "
            f"{', '.join(sorted(known))}."
        )
        values = {key: value for key, value in values.items() if key in known}
    if "scheduler" not in values:
        raise WrongValue(
            f"A scheduler of {kind} is a dict without 'scheduler'. Write {{'scheduler': …, 'interval': …}}."
        )
    scheduler = values["scheduler"]
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise WrongType(
            f"The scheduler {type(scheduler).__name__} of {kind} needs the methods step, state_dict and load_state_dict."
        )
    values.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    values.setdefault("monitor", monitor)
    config = SchedulerConfig(**values)
    if config.interval not in ("step", "epoch"):
        raise WrongValue(f"The scheduler of {kind} has interval={config.interval!r}; write 'step' or 'epoch'.")
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise WrongValue(f"The scheduler of {kind} has frequency={config.frequency!r}; write an int of 1 or more.")
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise WrongValue(
            f"The scheduler {type(scheduler).__name__} of {kind} steps on a value, and 'monitor' does not name one. Return "
            "{'optimizer': …, 'lr_scheduler': {'scheduler': …, 'monitor': 'val_loss'}}."
        )
    return config


class NoOptimizer(torch.optim.SGD):
    """Stands for the optimizer of a module whose ``configure_optimizers`` returned None: its steps change nothing."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
        return None if closure is None else closure()


def is_torch_scheduler(scheduler: Any) -> bool:
    """Whether ``scheduler.step()`` is all that a step of it needs."""
    return isinstance(scheduler, LRScheduler | ReduceLROnPlateau)
