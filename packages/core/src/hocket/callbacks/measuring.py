"""The base class of callbacks that measure one batch in many."""

from __future__ import annotations

import warnings
from typing import ClassVar

from hocket.callback import Callback
from hocket.state import State
from hocket.time import batches


class Measuring(Callback):
    """Listen to the class's `events` in every n-th batch only, and warn after a fit that had no such batch.

    A measured batch reads weights, gradients or activations several times, on code that no other batch runs. By default it is
    one in 500, which costs a step of a millisecond about 0.4 %.

    Args:
        every: number of batches between measurements.

    Raises:
        ValueError: ``every`` is not a positive int.
    """

    events: ClassVar[tuple[str, ...]]

    def __init__(self, every: int) -> None:
        self._every = batches(every)
        self.every_batches = dict.fromkeys(self.events, self._every)
        self._began = 0

    def fit_start(self, state: State) -> None:
        """Note the first batch."""
        self._began = state.timestamp.batch

    def fit_end(self, state: State) -> None:
        """Warn if nothing was measured."""
        now = state.timestamp.batch
        if now > self._began and now // self._every == self._began // self._every and state.strategy.rank == 0:
            had = f"batch {now}" if now == self._began + 1 else f"batches {self._began + 1} to {now}"
            warnings.warn(
                f"{type(self).__name__} measured nothing: it measures batches whose number is a multiple of "
                f"every={self._every}, and this fit had {had}. Give it every={10 if now >= self._began + 10 else 1}.",
                stacklevel=2,
            )
