"""Learning-rate schedules: the factor of the base learning rate of every parameter group at each step.

A schedule is any callable that takes a `Clock` and returns a number. The classes here follow two rules:

* The factor of a step is that of the time completed *before* it: the first step has ``t = 0``, as in
  ``torch.optim.lr_scheduler``.
* ``warmup`` raises the factor from 0 along a straight line, ``t / warmup`` times the factor at which the schedule
  starts, and reaches it exactly when the warm-up ends. So the first step of a run with warm-up has factor 0: it updates
  the averages of the optimizer, but no weights. The alternative, ``(t + 1) / warmup``, is only possible for batches: the
  number of tokens or seconds of the next step is not known in advance.

Points in time (``t_max``, ``milestones``) are counted from the beginning of training, warm-up included. Lengths
(``step_size``, ``decay_period``, ``t_0``) are counted from the end of the warm-up. Below, ``t`` is the time, ``w`` the
warm-up and ``x = (t - w) / (t_max - w)``, at most 1: after ``t_max`` the factor is constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from hocket.basics.clock import Clock, Schedule
from hocket.basics.direction import check_mode, mode_of
from hocket.basics.time import Time, whole
from hocket.errors import WrongValue

__all__ = [
    "WSD", "Clock", "Constant", "Cosine", "CosineRestarts", "Exponential", "Linear", "MultiStep", "Polynomial", "Schedule",
    "Step",
]  # fmt: skip


class Constant(Schedule):
    """``alpha``, constantly.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, Constant
        >>> schedule = Constant(warmup="10ba")  # or "constant(warmup=10ba)"
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))) for batch in (0, 5, 10, 99)]
        [0.0, 0.5, 1.0, 1.0]
    """

    def __init__(self, alpha: float = 1.0, *, warmup: str | Time = "0ba") -> None:
        super().__init__((), warmup)
        self.alpha = _number("alpha", alpha)

    def factor(self, now: float, warmup: float, *times: float) -> float:
        return self.alpha


class Step(Schedule):
    """``gamma ** floor((t - w) / step_size)``.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, Step
        >>> schedule = Step("30ba", gamma=0.5)
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("90ba"))) for batch in (0, 29, 30, 60)]
        [1.0, 1.0, 0.5, 0.25]
    """

    def __init__(self, step_size: str | Time, *, gamma: float = 0.1, warmup: str | Time = "0ba") -> None:
        self.step_size = _length("step_size", step_size)
        self.gamma = _number("gamma", gamma)
        super().__init__((self.step_size,), warmup)

    def factor(self, now: float, warmup: float, *times: float) -> float:
        return self.gamma ** whole((now - warmup) / times[0])


class MultiStep(Schedule):
    """``gamma ** n`` after ``n`` of the ``milestones``. A milestone within the warm-up lowers the target of the warm-up.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, MultiStep
        >>> schedule = MultiStep(["0.5dur", "0.75dur"], gamma=0.5)
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))) for batch in (0, 50, 75)]
        [1.0, 0.5, 0.25]
    """

    def __init__(self, milestones: Sequence[str | Time], *, gamma: float = 0.1, warmup: str | Time = "0ba") -> None:
        if isinstance(milestones, str | Time):
            raise WrongValue(f"milestones is a list of times, such as ['30ep', '60ep'], not {str(milestones)!r} alone.")
        self.milestones = [Time.parse(milestone) for milestone in milestones]
        self.gamma = _number("gamma", gamma)
        super().__init__(self.milestones, warmup)

    def factor(self, now: float, warmup: float, *times: float) -> float:
        return self.gamma ** sum(milestone <= now for milestone in times)


class Exponential(Schedule):
    """``gamma ** ((t - w) / decay_period)``, continuously.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, Exponential
        >>> schedule = Exponential(0.5, decay_period="10ba")
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))) for batch in (0, 10, 20)]
        [1.0, 0.5, 0.25]
    """

    def __init__(self, gamma: float, *, decay_period: str | Time = "1ep", warmup: str | Time = "0ba") -> None:
        self.gamma = _number("gamma", gamma)
        self.decay_period = _length("decay_period", decay_period)
        super().__init__((self.decay_period,), warmup)

    def factor(self, now: float, warmup: float, *times: float) -> float:
        return float(self.gamma ** ((now - warmup) / times[0]))


class _UntilTMax(Schedule):
    """A curve over ``x`` in [0, 1]."""

    def __init__(self, t_max: str | Time, warmup: str | Time) -> None:
        self.t_max = _length("t_max", t_max)
        super().__init__((self.t_max,), warmup)

    def check(self, warmup: float, *times: float) -> None:
        if times[0] <= warmup:
            raise WrongValue(
                f"The warm-up of {self.warmup} is not over before t_max={self.t_max}, which leaves no time for "
                f"{type(self).__name__}. Make the warm-up shorter or t_max later.",
                about="schedule",
            )

    def factor(self, now: float, warmup: float, *times: float) -> float:
        return self.curve(min((now - warmup) / (times[0] - warmup), 1.0))

    def curve(self, x: float) -> float:
        raise NotImplementedError


class Linear(_UntilTMax):
    """``alpha_i + (alpha_f - alpha_i) * x``.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, Linear
        >>> schedule = Linear(warmup="20ba")
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))) for batch in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        *,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        warmup: str | Time = "0ba",
    ) -> None:
        super().__init__(t_max, warmup)
        self.alpha_i = _number("alpha_i", alpha_i)
        self.alpha_f = _number("alpha_f", alpha_f)

    def curve(self, x: float) -> float:
        return self.alpha_i + (self.alpha_f - self.alpha_i) * x


class Cosine(_UntilTMax):
    """``alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`` (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5).

    Example:
        >>> import hocket, torch
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1))] * 10
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="adamw(lr=0.01)", train_data=data, device="cpu",
        ...     schedule=hocket.schedules.Cosine(warmup="0.05dur"),  # or "cosine(warmup=0.05dur)"
        ... )
        >>> result = trainer.fit("2ep")
    """

    def __init__(self, *, alpha_f: float = 0.0, t_max: str | Time = "1dur", warmup: str | Time = "0ba") -> None:
        super().__init__(t_max, warmup)
        self.alpha_f = _number("alpha_f", alpha_f)

    def curve(self, x: float) -> float:
        return self.alpha_f + (1.0 - self.alpha_f) * (1.0 + math.cos(math.pi * x)) / 2.0


class Polynomial(_UntilTMax):
    """``alpha_f + (1 - alpha_f) * (1 - x) ** power``.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, Polynomial
        >>> schedule = Polynomial(power=2)
        >>> [schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))) for batch in (0, 50, 100)]
        [1.0, 0.25, 0.0]
    """

    def __init__(
        self,
        power: float = 2.0,
        *,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        warmup: str | Time = "0ba",
    ) -> None:
        super().__init__(t_max, warmup)
        self.power = _number("power", power)
        self.alpha_f = _number("alpha_f", alpha_f)

    def curve(self, x: float) -> float:
        return float(self.alpha_f + (1.0 - self.alpha_f) * (1.0 - x) ** self.power)


class CosineRestarts(Schedule):
    """Cosine cycles, the first ``t_0`` long and each ``t_mult`` times as long as the one before.

    Loshchilov and Hutter 2017, eq. 5 (arXiv 1608.03983). Lengths of cycles are not rounded.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import Clock, CosineRestarts
        >>> schedule = CosineRestarts("10ba", t_mult=2)
        >>> [round(schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))), 2) for batch in (0, 5, 10, 20, 30)]
        [1.0, 0.5, 1.0, 0.5, 1.0]
    """

    def __init__(
        self,
        t_0: str | Time,
        *,
        t_mult: float = 1.0,
        alpha_f: float = 0.0,
        warmup: str | Time = "0ba",
    ) -> None:
        self.t_0 = _length("t_0", t_0)
        self.t_mult = _number("t_mult", t_mult)
        if t_mult < 1:
            raise WrongValue(f"t_mult is {t_mult}; cycles cannot get shorter and shorter, so give a number >= 1.")
        self.alpha_f = _number("alpha_f", alpha_f)
        super().__init__((self.t_0,), warmup)

    def factor(self, now: float, warmup: float, *times: float) -> float:
        cycles, ratio = (now - warmup) / times[0], self.t_mult
        if ratio == 1:
            x = cycles - whole(cycles)
        else:
            # n full cycles take 1 + ratio + ... + ratio**(n - 1) times the first one.
            n = whole(math.log1p(cycles * (ratio - 1)) / math.log(ratio))
            x = (cycles - (ratio**n - 1) / (ratio - 1)) / ratio**n
        # x may be slightly below 0 at a restart, due to rounding.
        return self.alpha_f + (1.0 - self.alpha_f) * (1.0 + math.cos(math.pi * max(x, 0.0))) / 2.0


class WSD(Schedule):
    """Warm-up, stable, decay: 1 until ``t_max - decay``, then down to ``alpha_f`` at ``t_max``.

    With ``y`` the completed fraction of the decay, the factor is ``alpha_f + (1 - alpha_f) * f(y)``, and ``shape`` selects
    f: ``"linear"`` is ``1 - y``, ``"sqrt"`` is ``1 - sqrt(y)``, ``"cosine"`` is ``(1 + cos(pi * y)) / 2``.

    Hu et al. 2024, section 4 (MiniCPM, arXiv 2404.06395) for the three stages; Hägele et al. 2024, section 3 (arXiv
    2405.18392) for the linear and 1-sqrt shapes, where the latter performed better.

    Example:
        >>> from hocket import Time, Timestamp
        >>> from hocket.schedules import WSD, Clock
        >>> schedule = WSD("0.2dur", shape="linear", warmup="10ba")
        >>> [round(schedule(Clock(Timestamp(batch=batch), Time.parse("100ba"))), 2) for batch in (5, 10, 80, 90, 100)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        decay: str | Time = "0.2dur",
        *,
        shape: Literal["linear", "sqrt", "cosine"] = "sqrt",
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        warmup: str | Time = "0ba",
    ) -> None:
        self.decay = _length("decay", decay)
        if shape not in ("linear", "sqrt", "cosine"):
            raise WrongValue(f"shape is {shape!r}; the decay can be 'linear', 'sqrt' or 'cosine'.")
        self.shape = shape
        self.alpha_f = _number("alpha_f", alpha_f)
        self.t_max = _length("t_max", t_max)
        super().__init__((self.decay, self.t_max), warmup)

    def check(self, warmup: float, *times: float) -> None:
        decay, t_max = times
        if (warmup + decay) * (1 - 1e-12) > t_max:  # 0.3 + 0.7 may be more than 1 by rounding
            raise WrongValue(
                f"A warm-up of {self.warmup} and a decay of {self.decay} do not fit before t_max={self.t_max}. Make "
                "one of them shorter or t_max later.",
                about="schedule",
            )

    def factor(self, now: float, warmup: float, *times: float) -> float:
        decay, t_max = times
        y = min(max(1.0 - (t_max - now) / decay, 0.0), 1.0)
        if self.shape == "linear":
            fall = 1.0 - y
        elif self.shape == "sqrt":
            fall = 1.0 - math.sqrt(y)
        else:
            fall = (1.0 + math.cos(math.pi * y)) / 2.0
        return self.alpha_f + (1.0 - self.alpha_f) * fall


class Plateau:
    """Multiply the learning rates by ``factor`` when a value has not improved for ``patience`` evaluations.

    The rule, and all arguments but the first, are those of torch's ``ReduceLROnPlateau``. Unlike the other schedules it is no
    function of time. It looks at the value after each evaluation of the metric's set, after each epoch for train metrics, and
    after each evaluation and epoch in which it was logged for values of ``state.log``.

    Args:
        on: ``label/name`` of a metric, such as ``"eval/loss"``; ``"train/name"`` for a train metric; or the name of a value
            that a plug-in logs with ``state.log``.
        mode: whether ``"max"`` or ``"min"`` is better; None infers it from usual names, such as ``"min"`` for
            losses and errors and ``"max"`` for accuracies, and raises otherwise.

    Raises:
        ValueError: ``mode`` is needed, or an argument is out of its range. When a fit starts: there is no such evaluation set.

    Example:
        >>> import hocket, torch
        >>> from hocket.schedules import Plateau
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), train_data=data, eval_data=data, device="cpu",
        ...     optimizer="sgd(lr=0.1)", schedule=Plateau("eval/loss", factor=0.5, patience=2), duration="5ep",
        ... )  # or schedule="plateau(on='eval/loss', factor=0.5, patience=2)"
        >>> trainer.fit().timestamp.epoch
        5
    """

    def __init__(
        self,
        on: str,
        mode: Literal["min", "max"] | None = None,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        check_mode(on, mode, lambda mode: f"plateau(on={on!r}, mode={mode!r})")
        better = mode_of(on) if mode is None else mode
        if better not in ("min", "max"):
            raise WrongValue(
                f"plateau cannot infer whether a higher '{on}' is better; pass «mode='max'» or «mode='min'»."
            )
        if not 0 <= _number("factor", factor) < 1 or patience < 0:
            raise WrongValue(
                f"plateau was given «factor={factor}» and «patience={patience}». Give a factor below 1.0 and 0 or more "
                "evaluations."
            )
        self.on = on
        #: The arguments of torch's ``ReduceLROnPlateau``.
        self.arguments: dict[str, Any] = {
            "mode": better, "factor": factor, "patience": patience, "threshold": threshold,
            "threshold_mode": threshold_mode, "cooldown": cooldown, "min_lr": min_lr, "eps": eps,
        }  # fmt: skip


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise WrongValue(f"{name} is {value!r}; give a finite number that is not negative.")
    return float(value)


def _length(name: str, time: str | Time) -> Time:
    parsed = Time.parse(time)
    if not parsed.value:
        raise WrongValue(f"{name} is {parsed}, but has to be longer than zero.")
    return parsed
