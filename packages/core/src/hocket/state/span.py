"""The part of a run in which an algorithm acts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hocket.basics.time import Time, TimeError, Unit

if TYPE_CHECKING:
    from hocket.state.state import State


class Span:
    """A part of a run, from ``start`` up to but without ``stop``: the arguments of that name of many algorithms.

    Both are fractions of the duration such as ``"0.2dur"``, or times in ep, ba, sp or tok; None for the beginning and the
    end of the run. Fractions advance by batch, whatever the unit of the duration. Of a span that is an attribute of an
    algorithm, and begins after the end of training or holds no batch, a fit warns (`hocket.NoEffectWarning`).

    Raises:
        TimeError: a time is in seconds, which ranks reach at different batches, or ``stop`` is not after ``start``.

    Example:
        >>> import hocket
        >>> span = hocket.Span("0.2dur", "0.8dur")
        >>> span
        Span(start='0.2dur', stop='0.8dur')
    """

    def __init__(self, start: str | Time | None = None, stop: str | Time | None = None) -> None:
        self.start = _time("start", start)
        self.stop = _time("stop", stop)
        if self.stop is not None:
            begin = Time(0, self.stop.unit) if self.start is None else self.start
            if begin.unit is self.stop.unit and not begin.value < self.stop.value:
                raise TimeError(f"«stop='{self.stop}'» is not after «start='{begin}'». Give a later stop, or omit it.")

    def includes(self, state: State) -> bool:
        """Whether the current batch is in it."""
        return _reached(state, self.start, default=True) and not _reached(state, self.stop, default=False)

    def ended(self, state: State) -> bool:
        """Whether ``stop`` is reached."""
        return _reached(state, self.stop, default=False)

    def opens(self, state: State) -> bool | None:
        """Whether ``start`` is before the end of the planned training; None if their units cannot be compared."""
        start, end = self.start, state.max_duration
        if start is None or start.unit is Unit.DURATION:
            return start is None or start.value < 1
        if end is not None and start.unit is end.unit:
            return start.value < end.value
        batches = {Unit.BATCH: 1, Unit.EPOCH: state.epoch_length or 0}
        if end is None or not batches.get(start.unit) or not batches.get(end.unit):
            return None
        return start.value * batches[start.unit] < end.value * batches[end.unit]

    def batches(self, state: State) -> range | None:
        """Return the numbers of the batches in it, of a training that is complete; None if units cannot be compared.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(
            ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd", duration="2ep", device="cpu",
            ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 5,
            ... )
            >>> result = trainer.fit()
            >>> hocket.Span("0.5dur", "9ba").batches(trainer.state)
            range(5, 9)
        """
        total, end = state.timestamp.batch, state.max_duration
        lengths = {Unit.BATCH: 1, Unit.EPOCH: state.epoch_length or 0}
        if end is not None and end.unit is not Unit.SECOND:
            lengths[Unit.DURATION] = total
        bounds = []
        for time, default in ((self.start, 0), (self.stop, total)):
            if time is not None and not lengths.get(time.unit):
                return None
            bounds.append(default if time is None else math.ceil((time.value - 1e-9) * lengths[time.unit]))
        return range(bounds[0], min(bounds[1], total))

    def __repr__(self) -> str:
        given = {name: str(time) for name, time in (("start", self.start), ("stop", self.stop)) if time is not None}
        return f"Span({', '.join(f'{name}={time!r}' for name, time in given.items())})"


def _time(name: str, given: str | Time | None) -> Time | None:
    time = None if given is None else Time.parse(given)
    if time is not None and time.unit is Unit.SECOND:
        raise TimeError(
            f"{name}='{time}' is in seconds, and ranks would reach a wall-clock time at different batches. Write a fraction of "
            "the duration such as '0.2dur', or epochs, batches, samples or tokens."
        )
    return time


def _reached(state: State, time: Time | None, default: bool) -> bool:
    if time is None:
        return default
    if time.unit is Unit.DURATION:
        return state.elapsed() >= time.value - 1e-9
    return state.timestamp.count(time.unit) >= time.value
