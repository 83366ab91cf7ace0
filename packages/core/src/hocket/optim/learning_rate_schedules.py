"""Learning-rate schedules: one interface for hocket's schedules and torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hocket.basics.time import Interval, Time, TimeError, Unit, time_of
from hocket.basics.timestamp import Timestamp
from hocket.data.stateful import has_state
from hocket.errors import WrongType, WrongValue
from hocket.help import optional_packages, warn
from hocket.plugins.building import build
from hocket.schedules import Clock, Plateau, Schedule
from hocket.state.state import State
from hocket.state.substates import LearningRate
from hocket.state.watching import label_of, warn_of_nothing, watch


class Rates:
    """The base of learning rates; by default nothing changes them."""

    def step(self, state: State) -> None:
        """See :class:`LearningRate`."""

    def epoch_end(self, state: State) -> None:
        """See :class:`LearningRate`."""

    def measured(self, state: State, names: Collection[str]) -> None:
        """See :class:`LearningRate`."""


class Scheduled(Rates):
    """Base learning rates times a schedule's factor. The factor is a function of time, so only the base is stored."""

    def __init__(self, optimizer: Optimizer, schedule: Callable[[Clock], float]) -> None:
        self._optimizer = optimizer
        self.schedule = schedule
        self._clock: Clock | None = None
        #: The duration for which the optimizer's learning rates, restored from a checkpoint, are valid already.
        self._valid_for: str | None = None
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def start(self, state: State) -> None:
        """See :class:`LearningRate`."""
        assert state.max_duration is not None
        self._clock = Clock(state.timestamp, state.max_duration, state.epoch_length)
        valid_for, self._valid_for = self._valid_for, None
        if valid_for != str(state.max_duration):
            self.step(state)

    def step(self, state: State) -> None:
        """See :class:`LearningRate`."""
        clock = self._clock
        assert clock is not None, "start comes first"
        clock.epoch_length = state.epoch_length
        factor = self.schedule(clock)
        for group in self._optimizer.param_groups:
            if "initial_lr" not in group:  # added since by add_param_group
                group["initial_lr"] = float(group["lr"])
            rate = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):  # compiled and captured optimizers keep the rate on the device
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LearningRate`. If a step was skipped, the learning rate lags the timestamp; it is restored as saved."""
        return {"duration": self._valid_for if self._clock is None else str(self._clock.max_duration)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :class:`LearningRate`."""
        self._clock, self._valid_for = None, state_dict["duration"]


class Stepped(Rates):
    """A torch LRScheduler, or another object with a ``step`` without arguments, stepped every N *optimizer* steps or epochs."""

    def __init__(self, scheduler: Any, optimizer: Optimizer, every: Time) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise WrongType(
                "ReduceLROnPlateau needs a metric at each step. Write «schedule=\"plateau(on='eval/loss')\"», which takes its "
                "arguments, with the name of the metric."
            )
        if every.unit not in (Unit.BATCH, Unit.EPOCH) or not every.value:
            raise WrongValue(
                f"«schedule_every='{every}'» is neither batches nor epochs; write '1ba', '1ep' or multiples."
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._every = every
        self._steps = 0
        #: Whether nobody said how often it is stepped.
        self.by_default = False

    def start(self, state: State) -> None:
        """Check the scheduler's lengths: it has set the first learning rate when it was created."""
        if self._every == Time(1, Unit.BATCH) and self._steps == 0:
            optional_packages.ask("scheduler_lengths.check", self._scheduler, state, self.by_default)

    def step(self, state: State) -> None:
        """See :class:`LearningRate`."""
        taken = state.step.taken
        for _ in range(1 if taken is None else taken.get(id(self._optimizer), 0)):
            self._steps += 1
            self._stepped()

    def _stepped(self) -> None:
        """Follow one step of the optimizer."""
        if self._every.unit is Unit.BATCH and self._steps % self._every.value == 0:
            self._step()

    def epoch_end(self, state: State) -> None:
        """See :class:`LearningRate`."""
        if Interval(self._every).due(state.previous, state.timestamp):
            self._step()

    def _step(self) -> None:
        if isinstance(self._scheduler, LRScheduler):
            _notice_added_groups(self._scheduler)
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LearningRate`."""
        return {"steps": self._steps, "scheduler": self._scheduler.state_dict() if has_state(self._scheduler) else {}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :class:`LearningRate`."""
        self._steps = state_dict["steps"]
        if has_state(self._scheduler):
            self._scheduler.load_state_dict(state_dict["scheduler"])


def _notice_added_groups(scheduler: LRScheduler) -> None:
    """Have a torch scheduler schedule groups that were added to its optimizer, and base rates (``initial_lr``) that changed.

    It keeps the base rate of each group, and LambdaLR a function of each, from when it was made.
    """
    for inner in getattr(scheduler, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        _notice_added_groups(inner)
    groups = scheduler.optimizer.param_groups
    rates: list[Any] = getattr(scheduler, "base_lrs", [])
    rates[:] = [group.setdefault("initial_lr", float(group["lr"])) for group in groups if rates]
    functions: list[Any] = getattr(scheduler, "lr_lambdas", [])
    if 0 < len(functions) < len(groups):
        if any(function is not functions[0] for function in functions):
            raise WrongValue(
                f"A parameter group was added to {type(scheduler.optimizer).__name__}, but {type(scheduler).__name__} was "
                "given a function for each of the groups before. Give it one function for all, or a schedule of hocket."
            )
        functions.extend(functions[:1] * (len(groups) - len(functions)))


class Updated(Stepped):
    """A scheduler of timm: ``step_update(num_updates)`` after each optimizer step, ``step(epoch)`` after each epoch."""

    def _stepped(self) -> None:
        self._scheduler.step_update(self._steps)

    def epoch_end(self, state: State) -> None:
        """See :class:`LearningRate`."""
        self._scheduler.step(state.timestamp.epoch)


class OnPlateau(Rates):
    """torch's ReduceLROnPlateau, stepped whenever there is a new value."""

    def __init__(self, optimizer: Optimizer, plateau: Plateau, number: int) -> None:
        self._scheduler = ReduceLROnPlateau(optimizer, **plateau.arguments)
        self._on, self._key = plateau.on, f"schedules/{number}"
        #: Whether there was a value, or a warning that there is none.
        self._seen = False

    def start(self, state: State) -> None:
        """Check the name of the value."""
        watch(state, "schedule='plateau'", self._key, self._on)

    def measured(self, state: State, names: Collection[str]) -> None:
        """See :class:`LearningRate`. Raises ValueError if the metric's set was evaluated without it."""
        its = label_of(state, self._on)
        if self._on in state.metrics:  # metrics are logged, too
            value = state.metrics[self._on] if self._on in names else None
        else:
            value = state.watched.take(state, self._key)
        if value is not None:
            self._seen = True
            self._scheduler.step(value)
        elif self._seen or self._on in state.metrics:
            return
        elif its is None and not state.timestamp.batch_in_epoch:
            self._seen = True
            warn_of_nothing(state, "schedule='plateau'", self._on)
        elif its is not None and any(label_of(state, name) == its for name in names):
            raise WrongValue(
                f"«schedule='plateau'» monitors '{self._on}', but there is no such metric. The metrics are: "
                f"{', '.join(sorted(state.metrics)) or 'none'}."
            )

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LearningRate`."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :class:`LearningRate`."""
        self._scheduler.load_state_dict(dict(state_dict))


def make_schedules(
    given: object, optimizers: Sequence[Optimizer], every: str | Time | None, names: Sequence[str] = ()
) -> list[LearningRate]:
    """Return the schedule of every optimizer.

    Args:
        given: a name or configuration such as ``"cosine(warmup=0.05dur)"``; a `hocket.schedules.Schedule`, or any function of
            a `Clock` that returns a number; a torch LRScheduler or a function of the optimizer that returns one; a sequence of
            those, one for each optimizer; a dict of those by the names of optimizers; None.
        every: how often torch's schedulers are stepped; None for each batch.
        names: of the optimizers.

    Raises:
        TypeError or ValueError: what was given is none of these, or does not fit the optimizers; or ``every`` has no effect.
    """
    time = Time(1, Unit.BATCH) if every is None else time_of(every, "schedule_every")
    rates = _make_all(given, optimizers, time, names)
    for rate in rates:
        if isinstance(rate, Stepped):
            rate.by_default = every is None
    if time != Time(1, Unit.BATCH) and not any(type(rate) is Stepped for rate in rates):
        raise WrongValue(
            f"«schedule_every='{time}'» is the interval at which a torch LRScheduler is stepped, and «schedule=» has none. "
            "hocket's schedules are functions of time, updated after each batch: omit «schedule_every=», and give times to the "
            "schedule, such as «schedule='step(step_size=1ep)'»."
        )
    return rates


def _make_all(given: object, optimizers: Sequence[Optimizer], every: Time, names: Sequence[str]) -> list[LearningRate]:
    if given is None:
        return []
    if not optimizers:
        raise WrongValue(
            "A schedule was given but no optimizer whose learning rate it could set. Pass «optimizer=» too."
        )
    if isinstance(given, Mapping) and names and given.keys() <= set(names):
        chosen = [(given[name], optimizer) for name, optimizer in zip(names, optimizers, strict=True) if name in given]
        return [_make(item, optimizer, every, number) for number, (item, optimizer) in enumerate(chosen)]
    if isinstance(given, Mapping):
        optional_packages.ask("failures.optimizers.check_names", given, names)
    schedules = list(given) if isinstance(given, list | tuple) else [given] * len(optimizers)
    if len(schedules) != len(optimizers):
        raise WrongValue(
            f"{len(schedules)} schedules were given for {len(optimizers)} optimizers; give one, or one for each."
        )
    pairs = zip(schedules, optimizers, strict=True)
    return [_make(item, optimizer, every, number) for number, (item, optimizer) in enumerate(pairs)]


def _make(given: Any, optimizer: Optimizer, every: Time, number: int) -> LearningRate:
    if isinstance(given, str | Mapping):
        given = build("schedules", given).obj
        if not isinstance(given, Plateau):
            return Scheduled(optimizer, given)
    if isinstance(given, Plateau):
        return OnPlateau(optimizer, given, number)
    if isinstance(given, Schedule):
        return Scheduled(optimizer, given)
    scheduler = given
    if callable(given) and not _is_scheduler(given):
        try:
            scheduler = given(optimizer)
        except (AttributeError, TypeError) as error:  # a function of a clock, called with an optimizer
            if not _takes_a_clock(given):
                if isinstance(given, type) and issubclass(given, LRScheduler):
                    raise WrongType(
                        f"«schedule={given.__name__}» is a class that needs arguments: {error}. Give a function of the "
                        f"optimizer: «schedule=lambda optimizer: torch.optim.lr_scheduler.{given.__name__}(optimizer, …)»."
                    ) from None
                error.add_note(
                    "schedule= was called with the optimizer, and is not a function of a clock either. Write schedule=lambda "
                    "clock: 0.95**clock.timestamp.epoch, or schedule=lambda optimizer: "
                    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)."
                )
                raise
            return Scheduled(optimizer, given)
        if isinstance(scheduler, int | float) and _takes_a_clock(given):
            return Scheduled(optimizer, given)
    if not _is_scheduler(scheduler):
        raise WrongType(
            f"«schedule={given!r}» gave {type(scheduler).__name__}. Pass a name such as 'cosine(warmup=0.05dur)', a "
            "hocket.schedules.Schedule, a function of a hocket.schedules.Clock that returns a number, or a function of the "
            "optimizer that returns a torch LRScheduler or another object with step()."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise WrongValue(
            f"The {type(scheduler).__name__} belongs to another {type(scheduler.optimizer).__name__} than the one used for "
            "training. Make it from the same optimizer, or pass a function of the optimizer: schedule=lambda optimizer: "
            f"torch.optim.lr_scheduler.{type(scheduler).__name__}(optimizer, …)."
        )
    if not has_state(scheduler):
        warn(
            f"{type(scheduler).__name__} has no state_dict and load_state_dict, so a resumed run begins with its initial state."
        )
    return (Updated if callable(getattr(scheduler, "step_update", None)) else Stepped)(scheduler, optimizer, every)


def _is_scheduler(given: object) -> bool:
    """Whether it is an object that sets learning rates when its ``step`` is called; an optimizer is none."""
    steps = callable(getattr(given, "step", None)) and not isinstance(given, type | Optimizer)
    return isinstance(given, LRScheduler) or steps


def _takes_a_clock(schedule: Callable[[Any], Any]) -> bool:
    """Whether a function takes a `Clock`: it returns a number, or raises TimeError for a time that is not known yet."""
    try:
        return isinstance(schedule(Clock(Timestamp(), Time(1, Unit.BATCH))), int | float)
    except TimeError:
        return True
    except Exception:
        return False
