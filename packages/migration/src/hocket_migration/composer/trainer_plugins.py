"""Plug-ins with which the Trainer of this package does what Composer's does."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence

import hocket
from hocket.data.batches import Counts
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Timestamp
from hocket_migration.composer.optim.schedulers import Schedulers
from hocket_migration.composer.task import ComposerTask


class StartSchedules(hocket.Callback):
    """Set the first learning rates as a fit begins, when the duration is known."""

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers

    def fit_start(self, state: hocket.State) -> None:
        """Set them."""
        self._schedulers.start()


class Positions(hocket.Callback):
    """Count the batches of each evaluation and prediction in ``state.eval_timestamp`` and ``state.predict_timestamp``."""

    def __init__(self, view: State) -> None:
        self._view, self._began = view, 0.0

    def eval_start(self, state: hocket.State) -> None:
        """Begin at 0."""
        self._view.eval_timestamp, self._began = Timestamp(), time.perf_counter()

    def eval_batch_end(self, state: hocket.State) -> None:
        """Count a batch."""
        self._view.eval_timestamp = self._next(self._view.eval_timestamp, state)

    def predict_start(self, state: hocket.State) -> None:
        """Begin at 0."""
        self._view.predict_timestamp, self._began = Timestamp(), time.perf_counter()

    def predict_batch_end(self, state: hocket.State) -> None:
        """Count a batch."""
        self._view.predict_timestamp = self._next(self._view.predict_timestamp, state)

    def _next(self, position: Timestamp, state: hocket.State) -> Timestamp:
        now, before = time.perf_counter(), self._began
        self._began = now
        try:
            samples, tokens = counts_of(state.task.count(state.batch))
        except (TypeError, ValueError):  # a batch without a number of samples
            samples = tokens = 0
        return position.to_next_batch(samples, tokens, datetime.timedelta(seconds=now - before))


def counts_of(counted: int | Counts) -> tuple[int, int]:
    """Return samples and tokens."""
    return (counted, 0) if isinstance(counted, int) else (counted.samples, counted.tokens)


class AskedIntervals(hocket.Callback):
    """Evaluate, or write checkpoints, when a function of the state and the event says so.

    Args:
        view: the state that the functions get.
        evaluating: the functions, of which one has to agree for an evaluation of all sets.
        saving: the function for checkpoints; None for none.
    """

    def __init__(
        self, view: State, evaluating: Sequence[Callable[..., bool]], saving: Callable[..., bool] | None
    ) -> None:
        self._view, self._evaluating, self._saving = view, list(evaluating), saving

    def batch_end(self, state: hocket.State) -> None:
        """Ask."""
        self._ask(state, Event.BATCH_END, Event.BATCH_CHECKPOINT)

    def epoch_end(self, state: hocket.State) -> None:
        """Ask."""
        self._ask(state, Event.EPOCH_END, Event.EPOCH_CHECKPOINT)

    def _ask(self, state: hocket.State, event: Event, saving: Event) -> None:
        view = self._view.bind(state)
        if any([asked(view, event) for asked in self._evaluating]):
            state.request(hocket.Decision.EVALUATE)
        if self._saving is not None and self._saving(view, saving):
            state.request(hocket.Decision.CHECKPOINT)


class DataFunctions(hocket.Algorithm):
    """Call the functions of a `DataSpec` on batches and microbatches, before all other algorithms."""

    events = {
        hocket.Event.AFTER_DATALOADER, hocket.Event.BEFORE_FORWARD,
        hocket.Event.EVAL_BATCH_START, hocket.Event.EVAL_BEFORE_FORWARD,
    }  # fmt: skip
    phase = hocket.Phase.SELECT

    def __init__(self, task: ComposerTask) -> None:
        self._task = task

    @classmethod
    def needed(cls, task: ComposerTask) -> list[DataFunctions]:
        """Return one in a list, or an empty list if no data has functions."""
        specs = [task.train_spec, *(each.dataloader for each in task.evaluators.values())]
        return [cls(task)] if any(s and (s.batch_transforms or s.microbatch_transforms) for s in specs) else []

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        """Transform the batch."""
        label = state.eval_label
        spec = self._task.train_spec if label is None else self._task.evaluators[label].dataloader
        whole = event in (hocket.Event.AFTER_DATALOADER, hocket.Event.EVAL_BATCH_START)
        function = spec and (spec.batch_transforms if whole else spec.microbatch_transforms)
        if function:
            state.batch = function(state.batch)
