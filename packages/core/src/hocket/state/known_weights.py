"""What is known of the weights of losses, from batch to batch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class MeanOver(enum.Enum):
    """What a loss is a mean over."""

    SAMPLES = enum.auto()
    #: A mean by hand, of as many elements as it is divided by.
    DIVISOR = enum.auto()
    #: Nothing so far: no label counted yet, and a later batch will show it.
    NOTHING = enum.auto()


@dataclasses.dataclass(frozen=True)
class CountedLabels:
    """A loss is a mean over labels of a batch: those under ``key`` other than -100.

    ``shifted``: without the first of each row, as in causal language models, which predict label i + 1 at position i.
    """

    key: str | int
    shifted: bool = False

    def __call__(self, batch: Batch) -> Tensor:
        """Return their number as a scalar tensor."""
        return (self.of(batch) != -100).sum()

    def of(self, batch: Batch) -> Tensor:
        """Return the labels that may count: ``(B, L)``, or ``(B, L - 1)`` if shifted."""
        labels: Tensor = batch[self.key]
        return labels[:, 1:] if self.shifted else labels


class KnownWeights:
    """What is known, from batch to batch, of the weights of the losses of a step; see `hocket.loop.weighing`."""

    __slots__ = ("additions", "batches", "covers_additions", "mean_over", "names")

    def __init__(self) -> None:
        #: What a loss that comes without a weight is a mean over.
        self.mean_over: MeanOver | CountedLabels = MeanOver.NOTHING
        #: The number of divided batches since that was tried; 0 if it is not to be tried again.
        self.batches = 0
        #: The number of microbatches of divided batches to whose loss plug-ins added something.
        self.additions = 0
        #: Whether the weight of the loss was that of what they added, when that was looked at last.
        self.covers_additions = True
        #: The names of losses that ranks agreed on; None before the first batch, and for a single rank.
        self.names: Sequence[str] | None = None
