"""The targets of mixed samples, such as those of MixUp and CutMix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hocket.data.batches import count, join, take_samples
from hocket.data.containers import register_batch
from hocket.errors import WrongValue


@dataclass(frozen=True, slots=True)
class Mixture:
    """The targets of mixed samples, each of which is a mixture of two samples.

    ``first[i]`` is the target of the sample that was at position i of the batch, which has the ``share``. ``second[i]`` is the
    target of its partner, the sample that was mixed into it, which has ``1 - share``. All samples have the same share. MixUp's
    is 1/2 or more; CutMix's is the fraction of the pixels that stayed, so the partner may have more.

    It stands where the targets were in a batch, and is moved, counted, split and joined with the samples. The loss of a
    mixture is that mixture of two losses, which is right for every loss, whatever its targets are (Zhang et al. 2018, arXiv
    1710.09412). For losses that are linear in the targets, such as a cross entropy, it is the loss of soft targets.

    ``first``, ``second``: targets of any kind, with one entry for each sample. ``share``: a number in [0, 1].

    Example:
        >>> import torch
        >>> from hocket.data import Mixture
        >>> # three quarters of a sample of class 0 and a quarter of one of class 1, and the other way round
        >>> mixed = Mixture(torch.tensor([0, 1]), torch.tensor([1, 0]), share=0.75)
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> mixed.loss(torch.nn.functional.cross_entropy, logits)
        tensor(0.6600)
    """

    first: Any
    second: Any
    share: float

    def map(self, function: Callable[[Any], Any]) -> Mixture:
        """Return the mixture of ``function(first)`` and ``function(second)``."""
        return replace(self, first=function(self.first), second=function(self.second))

    def loss(self, function: Callable[[Any, Any], Tensor], outputs: Any) -> Tensor:
        """Return ``share * function(outputs, first) + (1 - share) * function(outputs, second)``."""
        return self.share * function(outputs, self.first) + (1 - self.share) * function(outputs, self.second)


def _take(mixture: Mixture, indices: list[int]) -> Mixture:
    samples = count(mixture.first).samples
    return mixture.map(lambda targets: take_samples(targets, indices, samples))


def _join(parts: Sequence[Mixture]) -> Mixture:
    shares = {part.share for part in parts}
    if len(shares) > 1:
        raise WrongValue(
            f"Cannot join mixtures of different shares, {sorted(shares)}: their losses are weighted differently."
        )
    first, second = ([getattr(part, name) for part in parts] for name in ("first", "second"))
    return replace(parts[0], first=join(first), second=join(second))


register_batch(Mixture, count=lambda mixture: count(mixture.first).samples, take=_take, join=_join)
