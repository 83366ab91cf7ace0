"""Determine when a fit ends."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.basics.time import Time, TimeError, Unit, time_of
from hocket.data.errors import DataError
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.loop.fit import FitLoop
from hocket.state.state import State


def plan_fit(
    state: State, loop: FitLoop, planned: Time | None, limits: Sequence[Time], asked: str | Time | None
) -> bool:
    """Determine the end of a fit, in ``state.progress``. Return False, with a warning, if it is already reached.

    Args:
        planned: the Trainer's duration, and ``limits`` its further ones.
        asked: the duration of this fit, on top of the training done so far; None for the Trainer's.

    Raises:
        ValueError: there is no data, optimizer or duration, or the duration cannot be reached.
    """
    if not loop.has_data:
        raise WrongValue(
            "There is nothing to train on. Pass «train_data=» to the Trainer or to fit, or return it from train() of the data "
            "module."
        )
    if not state.optimizers:
        raise WrongValue(
            "There is no optimizer. Write «optimizer={'adamw': {'lr': 1e-3}}», or another, such as «lambda parameters: "
            "torch.optim.AdamW(parameters, lr=1e-3)¦`{torch.optim:AdamW: {lr: 0.001}}`»; or define configure_optimizers() in "
            "the Task."
        )
    before, state.progress.fit_asked = state.progress.fit_asked, None if asked is None else str(asked)
    end = fit_until(state, loop, planned, asked, before)
    if end is None:
        return False
    fresh = asked is None and loop.interrupted_at is None
    if fresh and (reached := first_reached(limits, state)) is not None:
        warn(f"Training is over: {reached} are done. Pass «fit(duration=…)¦`duration: …`» for more.")
        return False
    longer = planned is None or (planned.unit is end.unit and end > planned)
    state.progress.fit_until, state.progress.max_duration = end, end if longer else planned
    return True


def fit_until(
    state: State, loop: FitLoop, planned: Time | None, asked: str | Time | None, asked_before: str | None
) -> Time | None:
    """Return the end of a fit, counted from the beginning of training; None, with a warning, if it is already past.

    Args:
        planned: the Trainer's duration.
        asked: the duration of this fit, on top of the training done so far.
        asked_before: the duration of the previous fit, whose checkpoint this one may continue.

    Raises:
        ValueError: there is no duration, or it cannot be reached. DataError: the data never ends, and epochs are counted.
    """
    continues = loop.interrupted_at is not None and (None if asked is None else str(asked)) == asked_before
    if continues and state.progress.fit_until is not None and (asked is not None or planned is None):
        until = state.progress.fit_until
    elif asked is not None:
        more = duration(asked)
        until = Time(state.timestamp.count(more.unit) + more.value, more.unit)
    elif planned is not None:
        until = planned
        if state.timestamp.count(until.unit) >= until.value and loop.interrupted_at is None:
            warn(f"Training is over: {until} are done. Pass «fit(duration=…)¦`duration: …`» for more.")
            return None
    else:
        raise WrongValue(
            "There is no duration to train for. Pass «duration='10ep'» or the like to the Trainer or to fit."
        )
    if until.unit is Unit.EPOCH and loop.data.endless:
        raise DataError(
            f"The training data never ends, and neither does a duration of {until.value} epochs. Give the duration in "
            "batches ('1000ba') or limit an epoch with «limit_train=1000»."
        )
    remaining = until.value - state.timestamp.count(until.unit)
    resumed_from = state.identity.resumed_from
    if remaining <= 0 and resumed_from is not None:
        warn(
            f"Training is over: {until} were done before the checkpoint {resumed_from}. Nothing is trained; give a "
            "longer «duration=», or «fit(duration=…)¦`duration: …`» for more."
        )
    loop.data.check(remaining if until.unit is Unit.EPOCH else 0, remaining if until.unit is Unit.BATCH else 0)
    return until


def first_reached(limits: Sequence[Time], state: State) -> Time | None:
    """Return the first limit that is reached, counted from the beginning of training, or None."""
    return next((limit for limit in limits if state.timestamp.count(limit.unit) >= limit.value), None)


def durations(given: str | Time | Sequence[str | Time]) -> list[Time]:
    """Parse one duration, or a list of which the first to be over ends training."""
    choices = list(given) if isinstance(given, list | tuple) else [given]
    if not choices:
        raise TimeError("«duration=[]» has no duration. Give one such as '10ep', or a list such as ['10ep', '2h'].")
    return [duration(choice) for choice in choices]  # type: ignore[arg-type]


def check_minimum(least: Time | None, planned: Time | None) -> None:
    """Raise TimeError if ``min_duration`` is longer than the planned duration."""
    if least is None:
        return
    longest = Time(1, Unit.DURATION) if least.unit is Unit.DURATION else planned
    if longest is not None and longest.unit is least.unit and least > longest:
        raise TimeError(f"«min_duration={str(least)!r}» is longer than the duration of {planned}. Give a shorter one.")


def duration(given: str | Time) -> Time:
    """Parse a duration to train for. Raises TimeError for a fraction of the duration (``dur``), and for zero."""
    time = time_of(given, "duration")
    if not time.value:
        raise TimeError(
            f"«duration={str(time)!r}» trains nothing. Give a length such as '10ep', '1000ba' or '90min'; to evaluate only, "
            "call trainer.evaluate()."
        )
    if time.unit is Unit.DURATION:
        raise TimeError(
            f"A duration of {time} is a fraction of itself. Give it in ep, ba, sp, tok, or as a time such as '90min'."
        )
    return time
