"""What happened. Every listener of an event runs; what it returns is ignored.

Each event is a hook of its (lower-case) name with one argument, the :class:`~hocket.State`. The order below is the order
of a run; ``tests/test_event_order.py`` records it. Per event, algorithms run first, then callbacks, then loggers.

A listener that wants the loop to do something asks for it with ``state.request(Decision.STOP, reason=…)``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from hocket.state import State


class Event(enum.Enum):
    """The events of a run, in the order in which they happen. ``event.value`` is the name of the hook."""

    _value_: str

    def __new__(cls, name: str, doc: str) -> Event:
        event = object.__new__(cls)
        event._value_ = name
        event.__doc__ = doc
        return event

    # --- assembling: once per Trainer
    INIT = "init", "The model is on its device, no optimizer exists yet: the place for surgery on ``state.model``."
    BEFORE_LOAD = "before_load", "Optimizers and schedules exist; nothing was loaded from a checkpoint yet."
    AFTER_LOAD = "after_load", "The state is complete: fresh, or as the checkpoint left it."

    # --- fit
    FIT_START = "fit_start", "`Trainer.fit` begins; ``state.max_duration`` and ``state.epoch_length`` are known."
    EPOCH_START = "epoch_start", "A new pass over the training data begins (not when a fit continues an epoch)."
    BEFORE_DATALOADER = "before_dataloader", "The next batch is about to be asked for; also before the loader's end."
    AFTER_DATALOADER = "after_dataloader", "``state.batch`` is the whole batch of this rank, not yet on the device."
    BATCH_START = "batch_start", "The batch is counted. The last place at which SKIP_BATCH can be requested."
    BEFORE_TRAIN_BATCH = "before_train_batch", "Before the gradients of a batch are computed (SAM: twice a batch)."
    BEFORE_FORWARD = "before_forward", "``state.batch`` is one microbatch, on the device."
    AFTER_FORWARD = "after_forward", "``state.outputs`` is what the model returned for the microbatch."
    BEFORE_LOSS = "before_loss", "The loss is about to be computed from ``state.outputs`` and ``state.batch``."
    AFTER_LOSS = "after_loss", "``state.loss`` is the microbatch's mean loss, a scalar with a graph; it may be changed."
    BEFORE_BACKWARD = "before_backward", "Before the gradients of the microbatch are added to ``.grad``."
    AFTER_BACKWARD = "after_backward", "After the gradients of the microbatch were added to ``.grad``."
    AFTER_TRAIN_BATCH = (
        "after_train_batch",
        "``.grad`` of every parameter is the whole batch's gradient, unscaled, reduced over ranks, not yet clipped; "
        "``state.batch`` is the whole batch again and ``state.loss`` its mean loss, detached.",
    )
    BATCH_END = "batch_end", "The optimizer has stepped and ``state.timestamp`` counts this batch."
    EPOCH_END = "epoch_end", "The loader is exhausted and ``state.timestamp`` counts this epoch."

    # --- evaluation, inside a fit or from `Trainer.evaluate`
    EVAL_STANDALONE_START = "eval_standalone_start", "`Trainer.evaluate` begins."
    EVAL_BEFORE_ALL = "eval_before_all", "Before the first of the evaluation sets."
    EVAL_START = "eval_start", "An evaluation set begins: ``state.eval_label``. The model is in eval mode."
    EVAL_BATCH_START = "eval_batch_start", "``state.batch`` is an evaluation batch, not yet on the device."
    EVAL_BEFORE_FORWARD = "eval_before_forward", "``state.batch`` is one microbatch, on the device."
    EVAL_AFTER_FORWARD = "eval_after_forward", "``state.outputs`` is there; metrics have not seen it yet."
    EVAL_BATCH_END = "eval_batch_end", "Metrics have seen the batch."
    EVAL_END = "eval_end", "``state.metrics`` holds this set's values under ``label/name``."
    EVAL_AFTER_ALL = "eval_after_all", "After the last of the evaluation sets."
    EVAL_STANDALONE_END = "eval_standalone_end", "`Trainer.evaluate` is about to return."

    # --- checkpoints are due here, after evaluation
    BATCH_CHECKPOINT = "batch_checkpoint", "Everything of this batch is done, evaluation included."
    EPOCH_CHECKPOINT = "epoch_checkpoint", "Everything of this epoch is done, evaluation included."
    FIT_END = "fit_end", "The duration is over or a stop was requested; no further batch will be trained."

    # --- prediction
    PREDICT_START = "predict_start", "`Trainer.predict` begins. The model is in eval mode."
    PREDICT_BATCH_START = "predict_batch_start", "``state.batch`` is a batch, not yet on the device."
    PREDICT_BEFORE_FORWARD = "predict_before_forward", "``state.batch`` is the batch, on the device."
    PREDICT_AFTER_FORWARD = "predict_after_forward", "``state.outputs`` is there and may be changed."
    PREDICT_BATCH_END = "predict_batch_end", "The outputs were moved to the CPU and kept."
    PREDICT_END = "predict_end", "`Trainer.predict` is about to return."

    # --- whatever happens
    EXCEPTION = "exception", "``state.exception`` is leaving fit, evaluate or predict. Raising here hides nothing."
    CLOSE = "close", "Release what you hold. Comes after an exception too, may come twice, a later fit may follow."

    @property
    def closes(self) -> str | None:
        """For ``after_x`` the name of the event that it closes, ``before_x``; else None."""
        return f"before_{self.value.removeprefix('after_')}" if self.value.startswith("after_") else None


def _specification(event: Event) -> Callable[..., None]:
    def spec(self: Any, state: State) -> None: ...

    spec.__name__ = event.value
    spec.__qualname__ = f"Events.{event.value}"  # the dot tells pluggy that there is a self to skip
    spec.__doc__ = event.__doc__
    return hookspec(spec)


#: One hook per event, made from the table above so that the two cannot differ.
Events = type("Events", (), {"__doc__": __doc__, **{event.value: _specification(event) for event in Event}})
