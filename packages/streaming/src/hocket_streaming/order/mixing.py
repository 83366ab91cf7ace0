"""How many samples of each data set are among the first t of a mixture: a pure function of t.

The first t samples are divided by the divisor method of Webster and Sainte-Laguë: sample k of a data set with weight w comes at
``(k + 1/2) / w``. No share is off by a sample or more for two data sets, and shares never shrink as t grows (M. L. Balinski and
H. P. Young, *Fair Representation*, 1982).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Stage(NamedTuple):
    """Weights that hold from a position on.

    Args:
        begin: the position in samples, counted from the beginning of the run.
        weights: of each data set; only their ratios count.
    """

    begin: int
    weights: tuple[Fraction, ...]


class Mixing:
    """Divide the positions of a run among data sets.

    Args:
        stages: the first begins at 0.

    Example:
        >>> from fractions import Fraction
        >>> from hocket_streaming.order.mixing import Mixing, Stage
        >>> mixing = Mixing([Stage(0, (Fraction(3), Fraction(1)))])
        >>> [mixing.counts(t) for t in (0, 1, 2, 4, 1000)]
        [(0, 0), (1, 0), (2, 0), (3, 1), (750, 250)]
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = [(stage.begin, _whole(stage.weights)) for stage in stages]
        ends = [begin for begin, _ in self._stages[1:]]
        self._before = [(0,) * len(stages[0].weights)]
        for (begin, weights), end in zip(self._stages, ends, strict=False):
            self._before.append(_sum(self._before[-1], divided(end - begin, weights)))

    def __repr__(self) -> str:
        return f"Mixing({self._stages})"

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each data set among the first ``position``."""
        at = max(number for number, (begin, _) in enumerate(self._stages) if begin <= position)
        begin, weights = self._stages[at]
        return _sum(self._before[at], divided(position - begin, weights))


def divided(samples: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return how the first samples are divided by whole weights; of data sets whose turn it is, the first one."""
    total = sum(weights)
    counts = [(2 * weight * samples + total) // (2 * total) for weight in weights]
    used = [number for number, weight in enumerate(weights) if weight]
    while (left := samples - sum(counts)) > 0:
        counts[min(used, key=lambda i: (Fraction(2 * counts[i] + 1, weights[i]), i))] += 1
    while left < 0:
        counts[max(used, key=lambda i: (Fraction(2 * counts[i] - 1, weights[i]), i))] -= 1
        left += 1
    return tuple(counts)


def _whole(weights: Sequence[Fraction]) -> tuple[int, ...]:
    denominator = 1
    for weight in weights:
        denominator *= weight.denominator
    return tuple(int(weight * denominator) for weight in weights)


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))
