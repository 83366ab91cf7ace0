"""``accumulate="4ba"``: gather the loader's batches into windows, each of which is one batch of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.data.batches import Counts, Window
from hocket.data.reading import holds_scalars
from hocket.errors import WrongValue
from hocket.state.step import count
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.data.training_iterator import TrainingIterator
    from hocket.state.state import State


def count_window(state: State, batch: Batch) -> Counts:
    """Return the samples and tokens in a batch that may be a window."""
    if type(batch) is not Window:
        return count(state, batch)
    counts = [count(state, loaded) for loaded in batch.batches]
    return Counts(sum(loaded.samples for loaded in counts), sum(loaded.tokens for loaded in counts))


class Windows:
    """Load windows of ``size`` batches.

    A task with `hocket.Task.train_batch` gets the batches joined, because it computes on the full batch.

    Args:
        chooses_microbatch: whether to make each of the loader's batches a microbatch; False if the Trainer was given a size.
    """

    def __init__(self, state: State, size: int, chooses_microbatch: bool) -> None:
        self._state, self._size, self._chooses = state, size, chooses_microbatch
        #: The microbatch size set for the current window; None if another one is used.
        self._chosen: int | None = None
        #: The batches of the current window as the iterator returned them, and whether each counts.
        self.handed_out: list[tuple[Any, bool]] = []

    def load(self, data: TrainingIterator, first: tuple[Any, bool]) -> tuple[Counts, int, bool]:
        """Load a window into ``state.batch``, with the events of each batch and then batch_start.

        Returns its counts, of samples as loaded and of tokens after the events; the number of its samples after the events; and
        whether it counts at all: a window that does not is one padding batch.
        """
        self.end()  # after an exception
        state, bus, step = self._state, self._state.bus, self._state.step
        self.handed_out = [first]
        loaded, batches, samples = [], [], []
        following: tuple[Any, bool] | None = first
        while following is not None:
            step.batch, is_real = following
            counted = count(state, step.batch) if is_real else Counts(0)
            bus.after_dataloader(state)
            if is_real:
                changed = counted if step.batch is following[0] else count(state, step.batch)
                loaded.append(Counts(counted.samples, changed.tokens))
                batches.append(step.batch)
                samples.append(changed.samples)
            padding, following = step.batch, None
            if len(self.handed_out) < self._size:
                bus.before_dataloader(state)
                following = data.next(ends=False)
                if following is not None:
                    self.handed_out.append(following)
        step.batch = window = self._as_batch(batches or [padding], sum(samples))
        if self._chooses and state.microbatch is None:  # a plug-in or the strategy may set another one in batch_start
            state.microbatch = self._chosen = max(samples, default=1) or 1
        bus.batch_start(state)
        trained_on = sum(samples) if step.batch is window or not batches else count_window(state, step.batch).samples
        total = Counts(sum(counts.samples for counts in loaded), sum(counts.tokens for counts in loaded))
        return total, trained_on, bool(batches)

    def end(self) -> None:
        """Forget the microbatch size of the current window."""
        if self._state.microbatch == self._chosen:
            self._state.microbatch = None
        self._chosen = None

    def _as_batch(self, batches: list[Any], samples: int) -> Any:
        task = self._state.task
        if not task.owns_steps:
            return Window(batches)
        if len(batches) == 1:
            return batches[0]
        problem = f"Its batches are {type(batches[0]).__name__} with values that belong to no sample."
        if type(task).join is not Task.join or not any(map(holds_scalars, batches)):
            try:
                joined = task.join(batches)
                counted = count(self._state, joined).samples
                if counted == samples:
                    return joined
                problem = f"Joined, {len(batches)} batches of {samples} samples count {counted}."
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        raise WrongValue(
            f"«accumulate=» gives train_batch of {type(task).__name__} the batches of a window as one batch, and they cannot "
            f"be joined. {problem} Define join(parts) in {type(task).__name__}, which returns one batch, or omit «accumulate=»."
        )
