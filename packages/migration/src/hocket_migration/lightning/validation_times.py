"""When a fit validates: after the same batches as in Lightning, also within an accumulation window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.basics.time import Interval
from hocket.basics.timestamp import Timestamp
from hocket.errors import WrongValue
from hocket_migration.lightning.arguments import seconds_of
from hocket_migration.lightning.trainer_view import TrainerView


class Check(Interval):
    """Whether validation is due, from ``val_check_interval`` and ``check_val_every_n_epoch`` of a trainer with its data.

    hocket asks after each of its batches and epochs, the task after each batch within a window.

    Args:
        unless: says whether validation is omitted.

    Raises:
        ValueError: the data is too short, or its length is unknown where it is needed.
    """

    __slots__ = ("_batches", "_missed", "_timed", "_trainer", "_unless")
    at_end = False

    def __init__(self, trainer: TrainerView, unless: Callable[[], bool]) -> None:
        given, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
        if not isinstance(given, int | float) and not seconds_of(given):
            given = 1  # no time, which is over after each batch
        self._timed = not isinstance(given, int | float)
        super().__init__(f"{seconds_of(given):g}s" if self._timed else "1ba")
        self._trainer, self._unless, self._missed = trainer, unless, False
        #: A number of batches; None for the end of each epoch.
        self._batches = None if self._timed or unless() else _batches(given, epochs, trainer.num_training_batches)

    def due(
        self,
        previous: Timestamp,
        now: Timestamp,
        elapsed_before: float | None = None,
        elapsed_now: float | None = None,
    ) -> bool:
        """Whether validation is due after a batch of hocket's, or after an epoch."""
        missed, self._missed = self._missed, False
        ended = now.batch == previous.batch
        if not ended and self._trainer.stops:
            return self._in_epoch()
        if self._timed:
            return self._in_epoch() and super().due(previous, now, elapsed_before, elapsed_now)
        return missed or self._reached(ended)

    def due_within(self, together: bool) -> bool:
        """Whether validation is due after a batch within a window.

        Args:
            together: whether all ranks ask; otherwise validation follows at the window's end.
        """
        reached = self._reached(ended=False)
        self._missed |= reached and not together
        return reached and together

    def _in_epoch(self) -> bool:
        epochs = self._trainer.check_val_every_n_epoch
        return not self._unless() and (epochs is None or (self._trainer.current_epoch + 1) % epochs == 0)

    def _reached(self, ended: bool) -> bool:
        """Whether so many batches are done; ``ended`` says that the epoch is over, and not only its last batch."""
        trainer = self._trainer
        if self._timed or not self._in_epoch():
            return False
        if self._batches is None:
            return ended if trainer.num_training_batches == float("inf") else trainer.is_last_batch and not ended
        across = trainer.check_val_every_n_epoch is None
        done = (trainer.total_batch_idx if across else trainer.batch_idx) + 1
        return not ended and done % self._batches == 0


def _batches(interval: Any, epochs: int | None, length: int | float) -> int | None:
    if interval is None or (isinstance(interval, float) and interval == 1.0):
        if epochs is None:
            raise WrongValue("Trainer(check_val_every_n_epoch=None) needs val_check_interval=, a number of batches.")
        return None
    if isinstance(interval, float):
        if length == float("inf"):
            raise WrongValue(
                f"Trainer(val_check_interval={interval}) is a share of an epoch, whose length is unknown. Give a number of "
                "batches."
            )
        return max(1, int(length * interval))
    if epochs is not None and interval > length:
        raise WrongValue(
            f"Trainer(val_check_interval={interval}) is more than the {length} batches of an epoch. For an interval across "
            "epochs write check_val_every_n_epoch=None."
        )
    return int(interval)
