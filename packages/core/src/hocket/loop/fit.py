"""The training loop.

`run` is a fit, `_epoch` an epoch, `_batch` a batch, `_step` a step of the optimizers. Every ``bus.…(state)`` notifies plug-ins
of an event, or calls an action that they may replace: `loop/actions.py` has the default of each, down to ``backward``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.basics.control_c import Interruption
from hocket.basics.time import Interval, Unit
from hocket.data.batches import Counts
from hocket.data.errors import DataError
from hocket.data.training_iterator import TrainingIterator
from hocket.loop import agreement, resume_points
from hocket.loop.actions import gradients_again
from hocket.loop.evaluate import evaluate
from hocket.loop.modes import train_mode
from hocket.loop.nonfinite import NonFiniteGuard
from hocket.loop.resume_points import Stage
from hocket.state import scalars
from hocket.state.metrics import MetricSet
from hocket.state.requests import Decision
from hocket.state.state import State
from hocket.state.step import count

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.loop.accumulation import Windows
    from hocket.loop.task_steps import TaskSteps
    from hocket.state.substates import EvaluationSet


class FitLoop:
    """Train until ``progress.fit_until``. A Trainer has one loop: the next fit continues an epoch that the last one left.

    Args:
        guard: handles non-finite losses and gradients.
        log_every: the interval at which logged values are passed to the loggers.
        compiled: see `hocket.loop.steps.Steps`.
        windows: load the batches, each of which is a window of several; None for one batch of the data at a time.
    """

    def __init__(
        self,
        state: State,
        guard: NonFiniteGuard,
        log_every: Interval,
        compiled: Callable[[Any], Any] | None = None,
        windows: Windows | None = None,
    ) -> None:
        self.state: State = state
        #: The training data, and the metrics over an epoch; the Trainer sets them.
        self.data: TrainingIterator
        self.metrics: MetricSet
        self._guard = guard
        self._log_every = log_every
        self._windows = windows
        self._written_at = -1
        #: The ``step`` argument of a task with `train_batch`; None for other tasks.
        self.steps: TaskSteps | None = None
        if state.task.owns_steps:
            from hocket.loop.task_steps import TaskSteps

            self.steps = TaskSteps(state, self._step, compiled, guard, self._changed)
        #: The batch after which each evaluation set was evaluated last, by label.
        self._evaluated_at: dict[str, int] = {}
        #: The metrics, or None if there are none.
        self._active_metrics: MetricSet | None = None
        self._clock = 0.0
        #: The fractions of the duration before and after the latest batch, maintained if an interval is in ``dur``; in
        #: checkpoints "shares".
        self._fractions = (0.0, 0.0)
        self._by_duration = False
        #: The current stage of the fit, None outside.
        self.stage: Stage | None = None
        #: The position at which a checkpoint was taken or an exception ended the fit, until a fit continues there.
        self.interrupted_at: Mapping[str, Any] | None = None
        #: The exception, as text.
        self._raised = ""
        #: Control-C during this fit.
        self._interruption = Interruption()
        #: The evaluation sets due after the current batch or epoch, until all of them were evaluated.
        self._due: list[str] | None = None
        #: The current batch, as the iterator returned it.
        self._loaded: tuple[Any, bool] = (None, False)

    @property
    def has_data(self) -> bool:
        """Whether there is anything to train on."""
        return hasattr(self, "data")

    # --- a fit

    def run(self, interruption: Interruption | None = None) -> None:
        """Run everything from fit_start to fit_end. After an exception the next call continues from :attr:`interrupted_at`."""
        self._interruption = interruption or Interruption()
        self.stage = resume_points.START
        try:
            self._run()
        except BaseException as error:
            self._record_interruption(error)
            raise
        finally:
            self.stage = None

    def _record_interruption(self, error: BaseException) -> None:
        if self.stage is None or self.stage is resume_points.START:
            return  # `interrupted_at` still has the position before this fit
        if self.stage is resume_points.GRADIENTS:
            self.data.put_back([self._loaded] if self._windows is None else self._windows.handed_out)
        self.interrupted_at, self._raised = (
            self._position(self.stage.name),
            f"{type(error).__name__}: {error}".rstrip(": "),
        )
        for schedule in self.state.schedules:
            # `start` leaves the learning rates of a schedule that was loaded, and sets those of the time of another.
            schedule.load_state_dict(schedule.state_dict())

    def check(self) -> None:
        """Before a fit: raise RuntimeError if it cannot continue the last one after its exception; warn if it is inexact."""
        position = self.interrupted_at
        resume_points.check(self.state, position["stage"] if position else "", self._raised)

    def _run(self) -> None:
        state, bus = self.state, self.state.bus
        position = self.interrupted_at
        if position is None:
            state.requests.take(Decision.STOP)  # which ended the last fit, or came after it
        train_mode(state.task)
        state.optimization.parameters = list(state.task.parameters())
        state.aggregates.samples = None
        state.aggregates.reserve({"train/loss": "the loss of training", **self.metrics.reserved})
        intervals = [self._log_every, *(evaluated.every for evaluated in state.eval_sets.values())]
        self._active_metrics = self.metrics or None
        self._by_duration = any(
            interval.every is not None and interval.every.unit is Unit.DURATION for interval in intervals
        )
        done = state.elapsed() if self._by_duration else state.progress.displayed()
        self._fractions = (0.0, done) if position is None else position["shares"]
        for schedule in state.schedules if not self._over() else ():
            schedule.start(state)
        bus.fit_start(state)
        agreement.decide(state)
        self.interrupted_at, self._raised = None, ""
        if position is not None:
            resume_points.STAGES[position["stage"]].resume_with(self)
            if self._over() and self.data.in_progress and self._at_epoch_end():
                self._epoch()  # which only ends it
        while not self._over():
            self._epoch()
        self.stage = resume_points.END
        at, now = self._evaluated_at, state.timestamp.batch
        last = {label: s for label, s in state.eval_sets.items() if s.every and s.every.at_end and at.get(label) != now}
        self._evaluate(last)
        agreement.share_aggregates(state)
        self._train_metrics()
        self._guard.fit_end(state)
        if self.steps is not None:
            self.steps.fit_end()
        self.write_logs()  # before the checkpoint, so that a run resumed from it has these logs
        self._checkpoint(resume_points.OVER, bus.fit_end)
        agreement.share_aggregates(state)
        self.write_logs()
        agreement.compare_names(state)

    def _over(self) -> bool:
        state = self.state
        pending = state.requests.pending
        if pending is not Decision.NOTHING and Decision.STOP in pending and state.progress.may_stop():
            return True
        until, timestamp = state.progress.fit_until, state.timestamp
        assert until is not None
        if until.unit is Unit.TOKEN and timestamp.batch and not timestamp.token:
            raise DataError(
                f"No tokens were counted in {timestamp.batch} batches, so a duration of {until} never ends. Give it in ba, sp "
                "or ep, or use a hocket.Task whose count(batch) returns (samples, tokens)."
            )
        return timestamp.count(until.unit) >= until.value

    def close(self) -> None:
        """End the worker processes of the training data; the next fit still continues the epoch."""
        if self.has_data:
            self.data.suspend()

    # --- an epoch, or this fit's part of it

    def _epoch(self) -> None:
        state, bus, data = self.state, self.state.bus, self.data
        self._clock = time.perf_counter()
        if not data.in_progress:
            self.stage = resume_points.EPOCH_START
            state.timestamp.begin_epoch()
            self.metrics.reset()
            bus.epoch_start(state)
            data.start(state.timestamp.epoch)
        self.stage = resume_points.DATA
        data.resume(state.timestamp.epoch)
        # A fit that stops after the last batch of an epoch ends that epoch too.
        while not self._over() or self._at_epoch_end():
            self._interruption.check()
            bus.before_dataloader(state)
            loaded = data.next()
            if loaded is None:
                self._epoch_end()
                return
            self._loaded = loaded
            state.progress.ready += 1
            self._batch(*loaded)

    def _at_epoch_end(self) -> bool:
        return self.state.timestamp.batch_in_epoch == self.data.length

    def _epoch_end(self) -> None:
        state, bus = self.state, self.state.bus
        if state.timestamp.batch_in_epoch and not state.timestamp.sample_in_epoch:
            raise DataError(
                f"The {state.timestamp.batch_in_epoch} batches of epoch {state.timestamp.epoch} count 0 samples, so nothing "
                f"was trained. Check «train_data=», and count(batch) of {type(state.task).__name__} if it defines it."
            )
        self.stage = resume_points.STEP
        state.progress.epoch_length = self.data.length
        state.previous.become(state.timestamp)
        state.timestamp.next_epoch()
        for schedule in state.schedules:
            schedule.epoch_end(state)
        if self.steps is not None:
            self.steps.epoch_end()
        self.stage = resume_points.EPOCH_END
        self._train_metrics(epoch_ends=True)
        bus.epoch_end(state)
        self.after_epoch()

    def after_epoch(self) -> None:
        """Do what follows epoch_end."""
        self.stage = resume_points.AFTER_EPOCH
        agreement.decide(self.state)
        self._note(self.state.aggregates.reduce_epoch(clear=True))  # of epoch_end
        self._evaluate_due_sets()
        self._measured([name for name in self.state.metrics if name.startswith("train/")])
        self._checkpoint(resume_points.EPOCH, self.state.bus.epoch_checkpoint)
        self.write_logs()

    # --- a batch

    def _batch(self, batch: Batch, is_real: bool) -> None:
        state, bus, step = self.state, self.state.bus, self.state.step
        self.stage = resume_points.GRADIENTS
        if bus.interval:
            bus.begin_batch(state.timestamp.batch + 1)
        step.requested_steps = 1
        if self._windows is None:
            step.batch = batch
            loaded = count(state, batch) if is_real else Counts(0)
            bus.after_dataloader(state)
            bus.batch_start(state)
            samples = loaded.samples
            if is_real and step.batch is not batch:
                # Samples are counted as loaded, which is the position in the data; tokens as trained on.
                samples, tokens = count(state, step.batch)
                loaded = Counts(loaded.samples, tokens)
        else:
            loaded, samples, is_real = self._windows.load(self.data, (batch, is_real))
        skip = state.requests.take(Decision.SKIP_BATCH)
        total, trained_on = loaded, samples
        if state.strategy.world_size > 1:
            total, trained_on, skip = agreement.total(state, loaded, samples, skip)
        step.counts, step.samples, step.trained_on, step.metrics = total, samples, trained_on, self._active_metrics
        state.progress.started += 1
        state.aggregates.samples = samples

        stepped = False
        if not skip and trained_on:
            if step.requested_steps > 1:
                from hocket.loop.requested_steps import take_requested_steps

                stepped = take_requested_steps(state, step.requested_steps, self._step)
            else:
                stepped = self._step() if self.steps is None else self.steps.run(is_real)
        self.stage = resume_points.STEP
        if self._windows is not None:
            self._windows.end()
        state.previous.become(state.timestamp)
        now = time.perf_counter()
        state.timestamp.next_batch(total.samples, total.tokens, now - self._clock)
        self._clock = now
        if stepped:
            bus.schedule_step(state)
        state.progress.processed += 1
        self.stage = resume_points.BATCH_END
        bus.batch_end(state)
        state.aggregates.samples = None
        state.device_kind.batch_end()
        self.after_batch()

    def _step(self) -> bool:
        """Compute gradients and step the optimizers of the current step. Return False if guard or precision skip the step."""
        state, bus = self.state, self.state.bus
        bus.gradients(state)
        allowed = self._guard.allows(state)
        self.stage = resume_points.STEP
        return allowed and bus.optimizer_step(state, partial(gradients_again, state, self._guard))

    def _changed(self) -> None:
        """Note that the current batch cannot be trained on anew after an exception."""
        self.stage = resume_points.STEP

    def after_batch(self) -> None:
        """Do what follows batch_end."""
        state = self.state
        self.stage = resume_points.AFTER_BATCH
        if state.strategy.world_size > 1:
            agreement.decide(state)
        if self._by_duration or state.eval_sets:
            self._evaluate_due_sets()
        self._checkpoint(resume_points.BATCH, state.bus.batch_checkpoint)
        self.batch_completed()

    def batch_completed(self) -> None:
        """Do what follows the checkpoint of a batch."""
        state = self.state
        state.progress.completed += 1
        if self._log_every.due(state.previous, state.timestamp, *self._fractions):
            self.write_logs()

    # --- at the boundaries

    def _checkpoint(self, stage: Stage, event: Callable[[State], None]) -> None:
        self.stage = stage
        event(self.state)
        self.stage = resume_points.END if stage is resume_points.OVER else resume_points.DATA

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the fit as a tree. Raises RuntimeError in the middle of a batch."""
        position = self.interrupted_at if self.stage is None else None
        resume_points.check_complete(
            self.stage, position["stage"] if position else None, self.state.eval_label is not None
        )
        if position is not None:
            return dict(position)
        return self._position("" if self.stage is None or self.stage is resume_points.OVER else self.stage.name)

    def _position(self, stage: str) -> dict[str, Any]:
        return {
            "stage": stage,
            "shares": list(self._fractions),
            "evaluated_at": dict(self._evaluated_at),
            "written_at": self._written_at,
            "due": self._due,
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`: the next fit continues at the position of the saved one."""
        at, self._written_at = tree["evaluated_at"], tree["written_at"]
        # Older checkpoints hold one number for all sets.
        self._evaluated_at = dict.fromkeys(self.state.eval_sets, at) if isinstance(at, int) else dict(at)
        self.interrupted_at, self._raised = tree if tree["stage"] else None, ""
        self._due = tree.get("due")

    def _evaluate_due_sets(self) -> None:
        state = self.state
        if self._due is None:
            if self._by_duration:
                self._fractions = (self._fractions[1], state.elapsed())
            if not state.eval_sets:
                return
            wanted = state.requests.take(Decision.EVALUATE)
            self._due = [
                label
                for label, evaluated in state.eval_sets.items()
                if wanted or evaluated.every.due(state.previous, state.timestamp, *self._fractions)
            ]
        self._evaluate({label: evaluated for label, evaluated in state.eval_sets.items() if label in self._due})
        self._due = None

    def _evaluate(self, sets: Mapping[str, EvaluationSet]) -> None:
        if sets:
            values = evaluate(self.state, sets, self._interruption.check)
            self._measured(values)
            self._evaluated_at.update(dict.fromkeys(sets, self.state.timestamp.batch))
            self._clock = time.perf_counter()  # evaluation is not training time

    def _measured(self, names: Collection[str]) -> None:
        for schedule in self.state.schedules:
            schedule.measured(self.state, names)

    def _train_metrics(self, epoch_ends: bool = False) -> None:
        self._note({**self.metrics.compute(), **self.state.aggregates.reduce_epoch(clear=epoch_ends)})

    def _note(self, values: Mapping[str, float]) -> None:
        self.state.metrics.update(values)
        scalars.log(self.state, values)

    def write_logs(self) -> None:
        """Pass what was logged since the last call to the loggers."""
        if self.state.loss is not None and self._written_at != self.state.timestamp.batch:
            self._written_at = self.state.timestamp.batch
            if self.steps is None:  # steps of a `train_batch` log their own losses
                parts = {f"train/{name}": value for name, value in self.state.loss_parts.items()}
                scalars.log_losses(self.state, {"train/loss": self.state.loss, **parts})
        self._guard.interval_end(self.state)
        scalars.reduce_interval(self.state)
        scalars.flush(self.state)
