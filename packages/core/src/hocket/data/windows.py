"""Windows: several batches of the loader that are one batch of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Window:
    """The batch of ``Trainer(accumulate="4ba")``: four batches of the loader, in order; fewer at the end of an epoch.

    Each of them is computed on separately, as at least one microbatch.

    Example:
        >>> from hocket.data import Window
        >>> Window([[1, 2], [3]]).batches
        ([1, 2], [3])
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = tuple(batches)
