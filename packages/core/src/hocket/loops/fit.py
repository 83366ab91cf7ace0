"""The melody: one fit, read from top to bottom.

`run` is a fit, `_epoch` one pass over the data, `_batch` one optimizer step; `hocket.loops.gradients` is what that step is made
from. Every ``bus.…(state)`` is an event that plug-ins hear or an action that they may replace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hocket import scalars
from hocket.data.batches import Counts
from hocket.data.errors import DataError
from hocket.data.feed import Feed
from hocket.guard import NonFiniteGuard
from hocket.loops import agreement
from hocket.loops.evaluate import PreparedSet, evaluate
from hocket.loops.gradients import compute_gradients, count
from hocket.loops.metrics import MetricSet
from hocket.state import Decision, State
from hocket.time import Interval, Unit


class FitLoop:
    """Trains until ``state.fit_until``. One per Trainer: a pass over the data that one fit cuts off is continued by the next.

    Args:
        guard: what to do about losses and gradients that are not finite.
        log_every: when what was logged is handed to the loggers.
        compute: what computes the first gradients of a batch, in place of :func:`compute_gradients`.
    """

    def __init__(
        self,
        state: State,
        guard: NonFiniteGuard,
        log_every: Interval,
        compute: Callable[[State, int, int, MetricSet | None], None] = compute_gradients,
    ) -> None:
        self.state = state
        #: Where batches come from, and metrics over those of an epoch; the Trainer sets them.
        self.feed: Feed
        self.metrics: MetricSet
        self._guard = guard
        self._log_every = log_every
        self._compute = compute
        self._written_at = -1
        #: The batch after which each evaluation set was evaluated last, by label.
        self._evaluated_at: dict[str, int] = {}
        #: The metrics, if there are any.
        self._shown: MetricSet | None = None
        self._clock = 0.0
        #: The shares of the duration before and after the latest batch, kept up to date where an interval is in shares.
        self._shares = (0.0, 0.0)
        self._in_shares = False
        #: Where in a fit this is: ``"batch"`` or ``"epoch"`` while checkpoints are taken, ``"over"`` at its end, ``"fit"``
        #: elsewhere; "" outside.
        self.stage = ""
        #: The place that a checkpoint was taken at, until the fit that it was taken in goes on.
        self.left: Mapping[str, Any] | None = None

    @property
    def has_data(self) -> bool:
        """Whether there is anything to train on."""
        return hasattr(self, "feed")

    # --- a fit

    def run(self) -> None:
        """Everything from fit_start to fit_end."""
        self.stage = "fit"
        try:
            self._run()
        finally:
            self.stage = ""

    def _run(self) -> None:
        state, bus = self.state, self.state.bus
        left, self.left = self.left, None
        if left is None:
            state.take(Decision.STOP)
        state.parameters = list(state.task.parameters())
        intervals = [self._log_every, *(each.every for each in state.eval_sets.values())]
        self._shown = self.metrics if self.metrics else None
        self._in_shares = any(each.every is not None and each.every.unit is Unit.DURATION for each in intervals)
        self._shares = (0.0, state.elapsed()) if left is None else left["shares"]
        for schedule in state.schedules if not self._over() else ():
            schedule.start(state)
        bus.fit_start(state)
        agreement.decide(state)
        if left is not None:
            self._finish(left["stage"])
        while not self._over():
            self._epoch()
        at, now = self._evaluated_at, state.timestamp.batch
        self._evaluate({label: s for label, s in state.eval_sets.items() if s.every and at.get(label) != now})
        self._train_metrics()
        self._guard.fit_end(state)
        self._checkpoint("over", bus.fit_end)
        self._write_down()

    def _finish(self, stage: str) -> None:
        """What came after the checkpoint in the batch or epoch that it was taken at the end of."""
        if stage == "batch":
            self._batch_completed()
            if self._over() and self._at_epoch_end():
                self._epoch()
        else:
            self._write_down()

    def _over(self) -> bool:
        state = self.state
        if state.requested is not Decision.NOTHING and Decision.STOP in state.requested:
            return True
        until, timestamp = state.fit_until, state.timestamp
        assert until is not None
        if until.unit is Unit.TOKEN and timestamp.batch and not timestamp.token:
            raise DataError(
                f"No tokens were counted in {timestamp.batch} batches, so a duration of {until} never ends. Give it in ba, sp "
                "or ep, or use a hocket.Task whose count(batch) returns (samples, tokens)."
            )
        return timestamp.count(until.unit) >= until.value

    def close(self) -> None:
        """Forget the pass under way and end its worker processes."""
        if self.has_data:
            self.feed.close()

    # --- a pass over the data, or what this fit has of it

    def _epoch(self) -> None:
        state, bus, feed = self.state, self.state.bus, self.feed
        self._clock = time.perf_counter()
        if not feed.under_way:
            state.timestamp.begin_epoch()
            self.metrics.reset()
            bus.epoch_start(state)
            feed.start(state.timestamp.epoch)
        feed.go_on(state.timestamp.epoch)
        # A fit that stops after the last batch of an epoch ends that epoch too.
        while not self._over() or self._at_epoch_end():
            bus.before_dataloader(state)
            handed_out = feed.next()
            if handed_out is None:
                self._epoch_end()
                return
            state.progress.ready += 1
            self._batch(*handed_out)

    def _at_epoch_end(self) -> bool:
        return self.state.timestamp.batch_in_epoch == self.feed.length

    def _epoch_end(self) -> None:
        state, bus = self.state, self.state.bus
        state.epoch_length = self.feed.length
        state.previous.become(state.timestamp)
        state.timestamp.next_epoch()
        for schedule in state.schedules:
            schedule.epoch_end(state)
        self._train_metrics()
        bus.epoch_end(state)
        agreement.decide(state)
        self._evaluate_what_is_due()
        self._checkpoint("epoch", bus.epoch_checkpoint)
        self._write_down()

    # --- a batch

    def _batch(self, batch: Any, counts: bool) -> None:
        state, bus = self.state, self.state.bus
        state.batch = batch
        handed_out = count(state, batch) if counts else Counts(0)
        bus.after_dataloader(state)
        bus.batch_start(state)
        mine = handed_out.samples if state.batch is batch or not counts else count(state, state.batch).samples
        skip = state.requested is not Decision.NOTHING and state.take(Decision.SKIP_BATCH)
        total, trained_on, several = handed_out, mine, state.strategy.world_size > 1
        if several:
            total, trained_on, skip = agreement.total(state, handed_out, mine, skip)
        state.batch_samples, state.batch_tokens = total
        state.rank_samples = mine
        state.progress.started += 1

        stepped = False
        if not skip and trained_on:

            def closure() -> torch.Tensor:
                self._compute(state, mine, trained_on, None)
                self._guard.allows(state)
                return state.loss  # type: ignore[return-value]  # there now

            self._compute(state, mine, trained_on, self._shown)
            if self._guard.allows(state):
                stepped = bus.optimizer_step(state, closure)

        state.previous.become(state.timestamp)
        now = time.perf_counter()
        state.timestamp.next_batch(total.samples, total.tokens, now - self._clock)
        self._clock = now
        if stepped:
            bus.schedule_step(state)
        state.progress.processed += 1
        bus.batch_end(state)
        state.device_kind.batch_end()
        if several:
            agreement.decide(state)
        if self._in_shares or state.eval_sets:
            self._evaluate_what_is_due()
        self._checkpoint("batch", bus.batch_checkpoint)
        self._batch_completed()

    def _batch_completed(self) -> None:
        state = self.state
        state.progress.completed += 1
        if self._log_every.due(state.previous, state.timestamp, *self._shares):
            self._write_down()

    # --- at the boundaries

    def _checkpoint(self, stage: str, event: Callable[[State], None]) -> None:
        self.stage = stage
        event(self.state)
        self.stage = "fit"

    def may_checkpoint(self) -> bool:
        """Whether the guard lets a checkpoint be written; see :meth:`NonFiniteGuard.before_checkpoint`."""
        return self._guard.before_checkpoint(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Where in a fit this is, as a tree. Raises RuntimeError in the middle of a batch."""
        if self.left is not None:
            return dict(self.left)
        if self.stage == "fit" or self.state.eval_label is not None:
            raise RuntimeError(
                "The state is not complete in the middle of a batch or an evaluation. Take it in a callback's "
                "batch_checkpoint(state), epoch_checkpoint(state) or fit_end(state), or between fits."
            )
        return {
            "stage": "" if self.stage == "over" else self.stage,
            "shares": list(self._shares),
            "evaluated_at": dict(self._evaluated_at),
            "written_at": self._written_at,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`: the next fit goes on where the one was that the state was taken in."""
        at, self._written_at = tree["evaluated_at"], tree["written_at"]
        # Older checkpoints hold one number for all sets.
        self._evaluated_at = dict.fromkeys(self.state.eval_sets, at) if isinstance(at, int) else dict(at)
        self.left = tree if tree["stage"] else None

    def _evaluate_what_is_due(self) -> None:
        state = self.state
        if self._in_shares:
            self._shares = (self._shares[1], state.elapsed())
        if not state.eval_sets:
            return
        wanted = state.take(Decision.EVALUATE)
        self._evaluate(
            {
                label: evaluated
                for label, evaluated in state.eval_sets.items()
                if wanted or evaluated.every.due(state.previous, state.timestamp, *self._shares)
            }
        )

    def _evaluate(self, sets: dict[str, PreparedSet]) -> None:
        if sets:
            evaluate(self.state, sets)
            self._evaluated_at.update(dict.fromkeys(sets, self.state.timestamp.batch))
            self._clock = time.perf_counter()  # evaluation is not training time

    def _train_metrics(self) -> None:
        self.state.metrics.update(values := self.metrics.compute())
        self.state.log(values)

    def _write_down(self) -> None:
        if self.state.loss is not None and self._written_at != self.state.timestamp.batch:
            self._written_at = self.state.timestamp.batch
            self.state.log({"train/loss": self.state.loss})
            self.state.log({f"train/{name}": value for name, value in self.state.loss_parts.items()})
        self._guard.interval_end(self.state)
        scalars.flush(self.state)
