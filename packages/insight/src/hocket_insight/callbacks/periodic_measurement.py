"""The base class of callbacks that measure one batch in many."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.basics.time import batches
from hocket.help import warn
from hocket.hookspecs.callback import Callback
from hocket.state.state import State


class Measuring(Callback):
    """Listen to some events in every n-th batch only, and warn once after a fit if the run had no such batch.

    A measured batch reads weights, gradients or activations several times, on code that no other batch runs. By default it is
    one in 500, which costs a step of a millisecond about 0.4 %.

    Args:
        every: number of batches between measurements.
        hooks: the names of the events.

    Raises:
        ValueError: ``every`` is not a positive int.
    """

    def __init__(self, every: int, hooks: Iterable[str]) -> None:
        self.every_batches = dict.fromkeys(hooks, batches(every))
        self._warned = False

    def after_fit(self, state: State) -> None:
        """Warn if nothing was measured; not after a test by ``fast_dev_run`` or ``overfit``."""
        every, had = max(self.every_batches.values(), default=0), state.timestamp.batch
        if 0 < had < every and not self._warned and state.folder.lasting and state.strategy.rank == 0:
            self._warned = True
            warn(
                f"{type(self).__name__} has measured nothing: it measures batches whose number is a multiple of "
                f"«every={every}», and the run has had {had}. Give it «every={10 if had >= 10 else 1}»."
            )
