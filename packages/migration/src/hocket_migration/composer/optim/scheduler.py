"""Composer's learning-rate schedulers: functions of the state that return a factor of the base learning rate.

Times are converted as Composer does: a fraction of a duration of epochs, and a number of epochs, to whole batches; the rest
is multiplied by ``ssr`` (``scale_schedule_ratio``) and rounded down. Below, t is the position of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from hocket.errors import WrongState, WrongValue
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Time, TimeUnit


class ComposerScheduler(Protocol):
    """A scheduler: any callable that takes the state, and ``ssr`` if the schedule can be scaled, and returns a factor.

    Example:
        >>> def inverse(state, ssr=1.0):
        ...     return 1 / (1 + state.timestamp.batch.value / ssr)
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""


class _Scheduler:
    """Base of the schedulers here, which are equal if their arguments are."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def convert(time: str | Time, state: State, ssr: float = 1.0) -> Time:
    """Return a time in a unit in which a `Timestamp` counts, scaled.

    Raises:
        ValueError: the time is in seconds, or there is no duration.
        RuntimeError: it needs the length of an epoch, and that is unknown.
    """
    time, planned = Time.from_input(time), state.max_duration
    if time.unit is TimeUnit.SECOND:
        raise WrongValue(f"A scheduler cannot be given '{time}': it counts epochs, batches, samples or tokens.")
    if planned is None:
        raise WrongValue("A scheduler needs the duration: pass max_duration= to the Trainer.")
    if time.unit is TimeUnit.DURATION:
        if planned.unit is not TimeUnit.EPOCH:
            return Time(int(time.value * planned.value), planned.unit)
        return Time(int(time.value * _epoch(state, time) * planned.value), TimeUnit.BATCH)
    if time.unit is TimeUnit.EPOCH:
        time = Time(time.value * _epoch(state, time), TimeUnit.BATCH)
    return Time(int(time.value * ssr), time.unit)


def _epoch(state: State, time: Time) -> int:
    length = state.dataloader_len
    if length is None:
        raise WrongState(f"The data has no length, so '{time}' is not known in batches. Give the schedule in 'ba'.")
    return int(length)


def _fraction(state: State, t_max: Time) -> float:
    """Return t / t_max."""
    return float(state.timestamp.get(t_max.unit).value / t_max.value)


def _cosine(x: float, low: float) -> float:
    x = min(max(x, 0.0), 1.0)
    return low + (1.0 - low) * (1 + math.cos(x * math.pi)) / 2


class StepScheduler(_Scheduler):
    """``gamma ** floor(t / step_size)``."""

    def __init__(self, step_size: str | Time, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = step_size, gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        return float(self.gamma ** int(_fraction(state, convert(self.step_size, state, ssr))))


class MultiStepScheduler(_Scheduler):
    """``gamma ** n`` after n of the ``milestones``."""

    def __init__(self, milestones: Sequence[str | Time], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = milestones, gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        return float(self.gamma ** sum(state.timestamp >= convert(each, state, ssr) for each in self.milestones))


class ConstantScheduler(_Scheduler):
    """``alpha`` before ``t_max``, and 1 from there on."""

    def __init__(self, alpha: float = 1.0, t_max: str | Time = "1dur") -> None:
        self.alpha, self.t_max = alpha, t_max

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        return self.alpha if state.timestamp < convert(self.t_max, state, ssr) else 1.0


class LinearScheduler(_Scheduler):
    """``alpha_i + (alpha_f - alpha_i) * x``, with x = t / t_max, at most 1."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time = "1dur") -> None:
        self.alpha_i, self.alpha_f, self.t_max = alpha_i, alpha_f, t_max

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        x = min(_fraction(state, convert(self.t_max, state, ssr)), 1.0)
        return self.alpha_i + x * (self.alpha_f - self.alpha_i)


class ExponentialScheduler(_Scheduler):
    """``gamma ** (t / decay_period)``."""

    def __init__(self, gamma: float, decay_period: str | Time = "1ep") -> None:
        self.gamma, self.decay_period = gamma, decay_period

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        return float(self.gamma ** _fraction(state, convert(self.decay_period, state, ssr)))


class CosineAnnealingScheduler(_Scheduler):
    """``alpha_f + (1 - alpha_f) * (1 + cos(pi x)) / 2``, with x = t / t_max, at most 1."""

    def __init__(self, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max, self.alpha_f = t_max, alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        return _cosine(_fraction(state, convert(self.t_max, state, ssr)), self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(_Scheduler):
    """Cosine cycles, the first ``t_0`` long, and each ``t_mult`` times as long as the one before, rounded down.

    Raises ValueError, when called, once a cycle has no length.
    """

    def __init__(self, t_0: str | Time, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0, self.t_mult, self.alpha_f = t_0, t_mult, alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        first = convert(self.t_0, state, ssr)
        now, length = state.timestamp.get(first.unit).value, first.value
        end = length
        while end <= now:
            if not length:
                raise WrongValue(
                    f"The cycles of {self!r} have become so short that they have no length. Give t_mult=1 or more."
                )
            length = int(self.t_mult * length)
            end += length
        return _cosine((now - end + length) / length, self.alpha_f)


class PolynomialScheduler(_Scheduler):
    """``alpha_f + (1 - alpha_f) * (1 - x) ** power``, with x = t / t_max, at most 1."""

    def __init__(self, power: float, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.power, self.t_max, self.alpha_f = power, t_max, alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        x = min(_fraction(state, convert(self.t_max, state, ssr)), 1.0)
        return float(self.alpha_f + (1.0 - self.alpha_f) * (1 - x) ** self.power)


class _WithWarmup(_Scheduler):
    """A linear rise over ``t_warmup``, then a curve over x = (t - t_warmup) / (t_max - t_warmup).

    The warm-up is scaled with the schedule only with ``scale_warmup``, and then in its slope alone, as in Composer: its end,
    where the curve begins, is not.

    Raises ValueError, when called: the warm-up and ``t_max`` have different units, or ``t_max`` is before the end of training.
    """

    t_warmup: str | Time
    t_max: str | Time
    scale_warmup: bool

    def curve(self, x: float) -> float:
        """Return the factor after the warm-up."""
        raise NotImplementedError

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        warmup, t_max = convert(self.t_warmup, state), convert(self.t_max, state, ssr)
        if warmup.unit is not t_max.unit:
            raise WrongValue(
                f"{self!r}: the warm-up of {warmup} and t_max={t_max} have different units. Give both in one."
            )
        _check_end(self, t_max, state)
        if state.timestamp < warmup:
            rise = min(_fraction(state, convert(self.t_warmup, state, ssr if self.scale_warmup else 1.0)), 1.0)
            return rise * self.curve(0.0)
        now = state.timestamp.get(warmup.unit).value - warmup.value
        return self.curve(min(now / (t_max.value - warmup.value), 1.0) if t_max > warmup else 0.0)


def _check_end(scheduler: Any, t_max: Time, state: State) -> None:
    planned = state.max_duration
    assert planned is not None, "convert has checked it"
    if planned.unit is TimeUnit.EPOCH and t_max.unit is TimeUnit.BATCH and state.dataloader_len is not None:
        planned = Time(planned.value * int(state.dataloader_len), TimeUnit.BATCH)
    if planned.unit is t_max.unit and t_max < planned:
        raise WrongValue(f"{scheduler!r} ends at {t_max}, before the end of training at {planned}. Give t_max='1dur'.")


class MultiStepWithWarmupScheduler(_Scheduler):
    """A linear rise to 1 over ``t_warmup``, then ``gamma ** n`` after n of the ``milestones``."""

    def __init__(
        self, t_warmup: str | Time, milestones: Sequence[str | Time], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        self.t_warmup, self.milestones, self.gamma, self.scale_warmup = t_warmup, milestones, gamma, scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor."""
        if state.timestamp < convert(self.t_warmup, state):
            return min(_fraction(state, convert(self.t_warmup, state, ssr if self.scale_warmup else 1.0)), 1.0)
        return MultiStepScheduler(self.milestones, self.gamma)(state, ssr)


class LinearWithWarmupScheduler(_WithWarmup):
    """A linear rise to ``alpha_i`` over ``t_warmup``, then a linear change to ``alpha_f`` at ``t_max``."""

    def __init__(
        self,
        t_warmup: str | Time,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup, self.alpha_i, self.alpha_f = t_warmup, alpha_i, alpha_f
        self.t_max, self.scale_warmup = t_max, scale_warmup

    def curve(self, x: float) -> float:
        """Return the factor after the warm-up."""
        return self.alpha_i + x * (self.alpha_f - self.alpha_i)


class ConstantWithWarmupScheduler(_WithWarmup):
    """A linear rise to ``alpha`` over ``t_warmup``, then ``alpha``."""

    def __init__(
        self, t_warmup: str | Time, alpha: float = 1.0, t_max: str | Time = "1dur", scale_warmup: bool = False
    ) -> None:
        self.t_warmup, self.alpha, self.t_max, self.scale_warmup = t_warmup, alpha, t_max, scale_warmup

    def curve(self, x: float) -> float:
        """Return the factor after the warm-up."""
        return self.alpha


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """A linear rise to 1 over ``t_warmup``, then half a cosine to ``alpha_f`` at ``t_max``."""

    def __init__(
        self, t_warmup: str | Time, t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        self.t_warmup, self.t_max, self.alpha_f, self.scale_warmup = t_warmup, t_max, alpha_f, scale_warmup

    def curve(self, x: float) -> float:
        """Return the factor after the warm-up."""
        return _cosine(x, self.alpha_f)


class PolynomialWithWarmupScheduler(_WithWarmup):
    """A linear rise to 1 over ``t_warmup``, then ``alpha_f + (1 - alpha_f) * (1 - x) ** power``."""

    def __init__(
        self,
        t_warmup: str | Time,
        power: float = 2.0,
        t_max: str | Time = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup, self.power, self.t_max = t_warmup, power, t_max
        self.alpha_f, self.scale_warmup = alpha_f, scale_warmup

    def curve(self, x: float) -> float:
        """Return the factor after the warm-up."""
        return float(self.alpha_f + (1.0 - self.alpha_f) * (1 - x) ** self.power)
