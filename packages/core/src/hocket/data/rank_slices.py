"""Per-rank slices of the batches that a source reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Slices:
    """The base: one rank computes on every batch in full. Strategies and ``global_batch=`` have subclasses.

    Example:
        >>> import hocket.data
        >>> class EveryOther(hocket.data.Slices):
        ...     def slice(self, batches, repeat=False):
        ...         return (batch for number, batch in enumerate(batches) if number % 2 == 0)
        >>> list(hocket.data.adapt([1, 2, 3], EveryOther()))
        [1, 3]

    Args:
        global_batch: the size of a global batch, in ``"samples"`` or in ``"batches"`` of the data; recorded in positions.
            None: one batch of the data.
    """

    global_batch: tuple[int, str] | None = None
    #: Number of batches of the data that make one yielded batch.
    each = 1
    #: Whether ranks read different data, so that their positions differ too.
    own = False

    def slice(self, batches: Iterator[Any], repeat: bool = False) -> Iterator[Any]:
        """Return this rank's slices of ``batches``. ``repeat``: the first batch was yielded before, see `to_skip`."""
        return batches

    def read(self, yielded: int) -> int:
        """Return how many batches were read in the current epoch, in units of yielded batches."""
        return yielded

    def resumed(self, read: int) -> None:
        """Set the number of batches of the current epoch that were read before a resume."""

    def to_skip(self, read: int) -> tuple[int, bool]:
        """Return how many of the ``read`` batches to skip, and whether the next batch was yielded before (see `slice`)."""
        return read, False

    def length(self, batches: int) -> int:
        """Return the number of slices in an epoch of so many batches. Raises TypeError if it is unknown."""
        return batches
