"""The events of Composer's training loop, and those of hocket's that they are."""

from __future__ import annotations

from enum import StrEnum

import hocket


class Event(StrEnum):
    """The events of Composer, by its names. All but those of iterations are events of hocket, by the same names.

    ``ITERATION_START`` happens once, as a run begins. Composer's iterations have no length unless private attributes set it,
    so ``ITERATION_END`` and ``ITERATION_CHECKPOINT`` do not happen.

    Example:
        >>> from hocket_migration.composer import Event
        >>> Event("batch_end") is Event.BATCH_END, Event.AFTER_LOSS.is_after_event
        (True, True)
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
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
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @property
    def is_before_event(self) -> bool:
        """Whether it comes before something: ``before_x`` and ``x_start``."""
        return self.value.startswith("before_") or self.value.endswith("_start") or "_before_" in self.value

    @property
    def is_after_event(self) -> bool:
        """Whether it comes after something: ``after_x`` and ``x_end``."""
        return self.value.startswith("after_") or self.value.endswith("_end") or "_after_" in self.value

    @property
    def is_predict(self) -> bool:
        """Whether it happens in a prediction."""
        return self.value.startswith("predict")

    @property
    def is_eval(self) -> bool:
        """Whether it happens in an evaluation."""
        return self.value.startswith("eval")


def in_hocket() -> set[hocket.Event]:
    """Return hocket's events that Composer has too."""
    return {event for event in hocket.Event if event.value in _NAMES}


_NAMES = frozenset(event.value for event in Event)
