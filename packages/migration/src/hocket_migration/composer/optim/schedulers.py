"""Step the schedulers of a run, as Composer's Trainer steps them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket_migration.composer.core.state import State


def factor(scheduler: Any, view: State, ssr: float) -> float:
    """Return what a function of the state, and of the scale of the schedule if it takes that, returns."""
    alone = len(inspect.signature(scheduler).parameters) == 1
    return scheduler(view) if alone else scheduler(view, ssr)  # type: ignore[no-any-return]  # a number


def compile_composer_scheduler(scheduler: Any, state: State, ssr: float = 1.0) -> LambdaLR:
    """Return a scheduler of torch that sets the learning rates that a function of the state gives."""
    return LambdaLR(state.optimizers[0], lambda _: factor(scheduler, state, ssr))


class InUse:
    """A function of the state that the Trainer steps, with the methods of torch's schedulers that read."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer
        #: What the function returned last; None before, as in a resumed run.
        self.factor: float | None = None

    @property
    def base_lrs(self) -> list[float]:
        """The learning rates that the function is multiplied by."""
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        if self.factor is None:
            return [group["lr"] for group in self.optimizer.param_groups]
        return [rate * self.factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: a function of the state has no state of its own."""
        return {}

    def __repr__(self) -> str:
        return repr(self.scheduler)


class Schedulers:
    """Schedulers of the Trainer, in order: functions of the state, and torch's. hocket calls `step` like a torch scheduler.

    As in Composer a scheduler is stepped before the batch is counted. So the first two batches have the factor of time 0, and
    each later one that of the time before the batch before it. Of several functions, the last one sets the learning rate.
    """

    def __init__(self, given: Sequence[Any], view: State, optimizer: Optimizer, ssr: float, every_batch: bool) -> None:
        self._given, self._view, self.optimizer, self._ssr = list(given), view, optimizer, ssr
        self.every_batch = every_batch
        self._started = False
        self._check()

    def replace(self, given: Sequence[Any], ssr: float) -> None:
        """Use other schedulers from the next fit on."""
        self._given, self._ssr, self._started = list(given), ssr, False
        self._check()

    def _check(self) -> None:
        ssr = self._ssr
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        #: The schedulers as ``state.schedulers`` has them: each with ``get_last_lr()``.
        self.in_use = [each if isinstance(each, LRScheduler) else InUse(each, self.optimizer) for each in self._given]
        for scheduler in self._given:
            if not isinstance(scheduler, LRScheduler) and not callable(scheduler):
                raise WrongType(
                    f"schedulers={scheduler!r} is not a scheduler. Write one of composer.optim, such as "
                    "CosineAnnealingScheduler(), a function of the state that returns a factor, or a scheduler of torch."
                )
            if isinstance(scheduler, LRScheduler):
                scale(scheduler, ssr)
            elif ssr != 1.0 and len(inspect.signature(scheduler).parameters) == 1:
                raise WrongValue(
                    f"scale_schedule_ratio={ssr} needs schedulers that take it, and {scheduler!r} takes the state alone. Write "
                    "def scheduler(state, ssr=1.0), and multiply its times by ssr."
                )

    def start(self) -> None:
        """Set the first learning rate, when the duration is known."""
        if not self._started:
            self._started = True
            self._set(self._view.hocket.timestamp)

    def step(self) -> None:
        """Set the next learning rate, after a batch or an epoch."""
        for scheduler in self._given:
            if isinstance(scheduler, LRScheduler):
                scheduler.step()
        self._set(self._view.hocket.previous)

    def _set(self, position: Any) -> None:
        with self._view.at(position):
            for each in self.in_use:
                if isinstance(each, InUse):
                    each.factor = factor(each.scheduler, self._view, self._ssr)
                    for group, rate in zip(self.optimizer.param_groups, each.get_last_lr(), strict=True):
                        group["lr"] = rate

    def resumed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of a checkpoint of mosaicml's; the learning rates are the optimizer's."""
        self._started = True
        for scheduler, state in zip(self._given, saved, strict=False):
            if isinstance(scheduler, LRScheduler):
                scheduler.load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's schedulers; the others have none."""
        torchs = [each.state_dict() for each in self._given if isinstance(each, LRScheduler)]
        return {"started": self._started, "schedulers": torchs}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore it."""
        self._started = state_dict["started"]
        torchs = [each for each in self._given if isinstance(each, LRScheduler)]
        for scheduler, saved in zip(torchs, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


def every_batch(schedulers: Sequence[Any], given: bool | None) -> bool:
    """Whether schedulers are stepped after each batch: by default, unless there is one of torch's."""
    if given is not None:
        return given
    torchs = any(isinstance(each, LRScheduler) for each in schedulers)
    if torchs and not all(isinstance(each, LRScheduler) for each in schedulers):
        warn(
            "All schedulers are stepped after each epoch, because one is of torch. Write step_schedulers_every_batch=True to "
            "step them after each batch, or False."
        )
    return not torchs


#: The attributes of torch's schedulers that are lengths.
_LENGTHS = {
    "StepLR": "step_size",
    "MultiStepLR": "milestones",
    "CosineAnnealingLR": "T_max",
    "CosineAnnealingWarmRestarts": "T_0",
}


def scale(scheduler: LRScheduler, ssr: float) -> None:
    """Scale a torch scheduler's lengths in place. Raises ValueError for one whose lengths are not known."""
    if ssr == 1.0:
        return
    kind = type(scheduler).__name__
    known: Any = scheduler
    if kind == "ExponentialLR":
        known.gamma = known.gamma ** (1 / ssr)
    elif kind == "MultiStepLR":
        known.milestones = type(known.milestones)({int(k * ssr): v for k, v in known.milestones.items()})
    elif kind in _LENGTHS:
        setattr(known, _LENGTHS[kind], int(getattr(known, _LENGTHS[kind]) * ssr))
    else:
        raise WrongValue(
            f"scale_schedule_ratio={ssr} cannot scale {kind}, but {', '.join([*_LENGTHS, 'ExponentialLR'])} and functions "
            "of the state. Give the scheduler with scaled lengths, and max_duration= too."
        )
