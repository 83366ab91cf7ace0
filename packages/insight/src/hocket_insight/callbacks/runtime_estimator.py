"""Logging of the estimated remaining time."""

from __future__ import annotations

import math
import time

from hocket.basics.time import Time, Unit
from hocket.state.periodic import Periodic
from hocket.state.state import State


class RuntimeEstimator(Periodic):
    """Log ``time/remaining_seconds`` until the end of the planned duration, including evaluation.

    The estimate extrapolates the training time of this fit so far, without its first ``skip`` batches. It adds the mean
    evaluation time of each set for every remaining evaluation, once the set has been evaluated.

    Args:
        every: how often to log; the end of a fit logs too. The first interval in batches is part of the warm-up.
        skip: number of warm-up batches to exclude.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.runtime_estimator import RuntimeEstimator
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=[RuntimeEstimator(every="1ep")], loggers=["console"], device="cpu")
    """

    def __init__(self, every: str = "50ba", skip: int = 1) -> None:
        super().__init__(every)
        self._skip = skip
        self._first = 0  # batch at which the fit started
        #: Fraction of the duration and seconds at the start of the measurement, None during the warm-up.
        self._from: tuple[float, float] | None = None
        self._evaluating = 0.0
        self._evaluations: dict[str, tuple[int, float]] = {}  # by label: number of evaluations, and their seconds

    def fit_start(self, state: State) -> None:
        """Restart the measurement."""
        super().fit_start(state)
        self._first, self._from, self._evaluations = state.timestamp.batch, None, {}
        self._begin(state)

    def _in_every_batch(self) -> bool:
        return False  # batch_end begins the measurement in the first batch in which it is called

    def _begin(self, state: State) -> None:
        if state.timestamp.batch - self._first >= self._skip:
            self._from = (state.elapsed(), state.timestamp.seconds)

    def batch_end(self, state: State) -> None:
        """Begin the measurement after the warm-up; later, log if the interval is due."""
        if self._from is None:
            self._begin(state)
        else:
            super().batch_end(state)

    def _report(self, state: State) -> None:
        elapsed = state.elapsed()
        if self._from is not None and (done := elapsed - self._from[0]) > 0:
            training = (state.timestamp.seconds - self._from[1]) / done * (1 - elapsed)
            state.log({"time/remaining_seconds": training + self._evaluation_seconds(state, elapsed)})

    def _evaluation_seconds(self, state: State, elapsed: float) -> float:
        seconds = 0.0
        for label, evaluated in state.eval_sets.items():
            times, took = self._evaluations.get(label, (0, 0.0))
            if times and evaluated.every.every is not None:
                seconds += took / times * _left(state, evaluated.every.every, elapsed)
        return seconds

    def eval_start(self, state: State) -> None:
        """Start timing the evaluation."""
        self._evaluating = time.perf_counter()

    def eval_end(self, state: State) -> None:
        """Add the time of the evaluation."""
        assert state.eval_label is not None
        times, seconds = self._evaluations.get(state.eval_label, (0, 0.0))
        self._evaluations[state.eval_label] = (times + 1, seconds + time.perf_counter() - self._evaluating)


def _left(state: State, every: Time, elapsed: float) -> int:
    """Return the number of remaining multiples of ``every``; the end of the fit counts as one."""
    unit, end = every.unit, state.max_duration
    assert end is not None
    if unit is Unit.DURATION:
        now, total = elapsed, 1.0
    else:
        now = float(state.timestamp.count(unit))
        if unit is Unit.EPOCH and state.epoch_length:
            now += state.timestamp.batch_in_epoch / state.epoch_length
        total = float(end.value) if unit is end.unit else now / elapsed
    # The tolerance treats a quotient slightly below an integer, due to rounding, as that integer.
    return max(0, math.ceil(total / every.value - 1e-9) - math.floor(now / every.value + 1e-9))
