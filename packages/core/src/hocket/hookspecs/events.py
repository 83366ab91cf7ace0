"""Events of the training loop. Every listener of an event runs; return values are ignored.

Each event is a hook of its (lower-case) name with one argument, the :class:`~hocket.State`. Events are listed in the order
of a run; ``tests/test_event_order.py`` records it. For each event, algorithms run first, then the task
(`hocket.Task` may define an event as a method), then callbacks, then loggers.

To make the loop act, a listener calls ``state.request(Decision.STOP, reason=…)``.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket.help.attributes import Named, unknown_member
from hocket.hookspecs.markers import hooks

if TYPE_CHECKING:
    from hocket.state.state import State


class Event(enum.Enum, metaclass=Named):
    """The events of a run, in the order in which they happen. ``event.value`` is the name of its hook in `Events`.

    Example:
        >>> import hocket
        >>> hocket.Event.BATCH_END.value
        'batch_end'
    """

    # --- construction: once per Trainer
    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"

    # --- fit
    BEFORE_FIT = "before_fit"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    EPOCH_END = "epoch_end"

    # --- evaluation, inside a fit or from `Trainer.evaluate`
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_END = "eval_standalone_end"

    # --- checkpoints are due here, after evaluation
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"
    AFTER_FIT = "after_fit"

    # --- prediction
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    # --- errors and clean-up
    EXCEPTION = "exception"
    CLOSE = "close"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise WrongValue(unknown_member(cls, str(value)))

    @property
    def closes(self) -> str | None:
        """The paired event ``before_x`` of an ``after_x`` event, else None."""
        return f"before_{self.value.removeprefix('after_')}" if self.value.startswith("after_") else None


def between(first: Event, last: Event) -> tuple[Event, ...]:
    """Return the events from ``first`` to ``last``, in the order of `Event`."""
    events = list(Event)
    return tuple(events[events.index(first) : events.index(last) + 1])


#: The events of each microbatch. A strategy without ``microbatch_events`` does not call them.
MICROBATCH_EVENTS = between(Event.BEFORE_FORWARD, Event.AFTER_BACKWARD)


@hooks()
class Events:
    """A hook for each event, in the order of `Event`."""

    # --- construction: once per Trainer

    def init(self, state: State, /) -> None:
        """The model is on its device and no optimizer exists yet. Do surgery on ``state.model`` here."""

    def before_load(self, state: State, /) -> None:
        """Optimizers and schedules exist; no checkpoint has been loaded yet."""

    def after_load(self, state: State, /) -> None:
        """The state is complete: fresh, or restored from the checkpoint."""

    # --- fit

    def before_fit(self, state: State, /) -> None:
        """`Trainer.fit` was called and is ready to train, but has logged nothing yet. Raise here to refuse the fit."""

    def fit_start(self, state: State, /) -> None:
        """`Trainer.fit` begins; ``state.max_duration`` and ``state.epoch_length`` are known."""

    def epoch_start(self, state: State, /) -> None:
        """A new epoch begins. Not called when a fit continues an epoch."""

    def before_dataloader(self, state: State, /) -> None:
        """The next batch is about to be fetched. Also called before the loader turns out to be exhausted."""

    def after_dataloader(self, state: State, /) -> None:
        """``state.batch`` is the full batch of this rank, not yet on the device unless ``batch_transform=`` or an earlier
        algorithm moved it.

        With ``accumulate="4ba"`` this event and before_dataloader happen for each of the four batches, and from batch_start on
        ``state.batch`` is a `hocket.data.Window` of them (for a task with ``train_batch``: them joined).
        """

    def batch_start(self, state: State, /) -> None:
        """The batch size is known. This is the last event in which SKIP_BATCH can be requested."""

    def before_train_batch(self, state: State, /) -> None:
        """The gradients of a batch are about to be computed (with SAM, twice per batch)."""

    def before_forward(self, state: State, /) -> None:
        """``state.batch`` is one microbatch, on the device."""

    def after_forward(self, state: State, /) -> None:
        """``state.outputs`` is what the model returned for the microbatch; it is freed after before_backward."""

    def before_loss(self, state: State, /) -> None:
        """The loss is about to be computed from ``state.outputs`` and ``state.batch``."""

    def after_loss(self, state: State, /) -> None:
        """``state.loss`` is the microbatch's mean loss, a scalar with its graph; it may be replaced."""

    def before_backward(self, state: State, /) -> None:
        """The gradients of the microbatch are about to be added to ``.grad``."""

    def after_backward(self, state: State, /) -> None:
        """The gradients of the microbatch have been added to ``.grad``."""

    def after_train_batch(self, state: State, /) -> None:
        """The gradients of the full batch are in ``.grad``: unscaled, reduced over ranks, not yet clipped.

        ``state.batch`` is the full batch again, and ``state.loss`` its mean loss, detached.
        """

    def batch_end(self, state: State, /) -> None:
        """The optimizer has stepped and ``state.timestamp`` counts this batch."""

    def epoch_end(self, state: State, /) -> None:
        """The loader is exhausted and ``state.timestamp`` counts this epoch."""

    # --- evaluation, inside a fit or from `Trainer.evaluate`

    def eval_standalone_start(self, state: State, /) -> None:
        """`Trainer.evaluate` begins."""

    def eval_before_all(self, state: State, /) -> None:
        """The first evaluation set is about to be evaluated."""

    def eval_start(self, state: State, /) -> None:
        """The evaluation of the set ``state.eval_label`` begins. The model is in eval mode."""

    def eval_batch_start(self, state: State, /) -> None:
        """``state.batch`` is an evaluation batch, not yet on the device."""

    def eval_before_forward(self, state: State, /) -> None:
        """``state.batch`` is one microbatch, on the device."""

    def eval_after_forward(self, state: State, /) -> None:
        """``state.outputs`` is set; metrics have not been updated with it yet."""

    def eval_batch_end(self, state: State, /) -> None:
        """Metrics have been updated with the batch."""

    def eval_end(self, state: State, /) -> None:
        """``state.metrics`` contains this set's values as ``label/name``."""

    def eval_after_all(self, state: State, /) -> None:
        """The last evaluation set has been evaluated."""

    def eval_standalone_end(self, state: State, /) -> None:
        """`Trainer.evaluate` is about to return."""

    # --- checkpoints are due here, after evaluation

    def batch_checkpoint(self, state: State, /) -> None:
        """All work of this batch is done, including evaluation."""

    def epoch_checkpoint(self, state: State, /) -> None:
        """All work of this epoch is done, including evaluation."""

    def fit_end(self, state: State, /) -> None:
        """The duration is reached or a stop was requested; no further batch will be trained on."""

    def after_fit(self, state: State, /) -> None:
        """The fit is over: all values were logged, and all listeners of ``fit_end`` have run. Not called after an exception."""

    # --- prediction

    def predict_start(self, state: State, /) -> None:
        """`Trainer.predict` begins. The model is in eval mode."""

    def predict_batch_start(self, state: State, /) -> None:
        """``state.batch`` is a batch, not yet on the device."""

    def predict_before_forward(self, state: State, /) -> None:
        """``state.batch`` is the batch, on the device."""

    def predict_after_forward(self, state: State, /) -> None:
        """``state.outputs`` is set and may be replaced."""

    def predict_batch_end(self, state: State, /) -> None:
        """The outputs were moved to the CPU and stored."""

    def predict_end(self, state: State, /) -> None:
        """`Trainer.predict` is about to return."""

    # --- errors and clean-up

    def exception(self, state: State, /) -> None:
        """``state.exception`` is propagating out of fit, evaluate or predict. An error raised here does not hide it."""

    def close(self, state: State, /) -> None:
        """Release all resources. Also called after an exception; may be called twice, and a later fit may follow."""


assert [event.value for event in Event] == [name for name in vars(Events) if not name.startswith("_")]
