"""What one rank computes on, of the batches that a source reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Slices:
    """The base: one rank computes on every batch, as it is. Strategies and ``global_batch=`` have their own.

    Example:
        >>> import hocket.data
        >>> class EveryOther(hocket.data.Slices):
        ...     def slice(self, batches, repeat=False):
        ...         return (batch for number, batch in enumerate(batches) if number % 2 == 0)
        >>> list(hocket.data.adapt([1, 2, 3], EveryOther()))
        [1, 3]

    Args:
        global_batch: what makes a global batch, recorded in positions: so many ``"samples"``, or ``"batches"`` of the data.
            None: as the data has it.
    """

    global_batch: tuple[int, str] | None = None
    #: How many batches of the data make one that is yielded.
    each = 1
    #: Whether ranks read different data, so that their positions differ too.
    own = False

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """Return this rank's slices of ``batches``. ``repeat``: the first batch was yielded before, see `to_skip`."""
        return batches

    def read(self, yielded: int) -> int:
        """Return how many batches were read in the epoch in progress, in units of those that are yielded."""
        return yielded

    def resumed(self, read: int) -> None:
        """So many batches of the epoch in progress were read before."""

    def to_skip(self, read: int) -> tuple[int, bool]:
        """Return how many of the batches that were read need not be read again, and whether the next one only repeats."""
        return read, False

    def length(self, batches: int) -> int:
        """Return the slices of an epoch of so many batches. Raises TypeError where that is not known."""
        return batches
