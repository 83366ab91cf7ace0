"""The arithmetic of a learning-rate range test, of losses as numbers.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2017 (arXiv:1506.01186), section 3.3: the learning rate
rises from step to step, and the loss shows at which rates the model learns and from where on it diverges.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: The decay of the moving average of losses, and the number of steps at the beginning that tell their noise.
BETA, _FIRST = 0.8, 8


def rates(low: float, high: float, steps: int) -> list[float]:
    """Return learning rates that rise exponentially.

    Example:
        >>> from hocket_tools.tuning.range_test import rates
        >>> rates(0.01, 1.0, 3)
        [0.01, 0.1, 1.0]
    """
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def smoothed(losses: Sequence[float], beta: float = BETA) -> list[float]:
    """Return the exponential moving average of losses, with the bias correction of Adam (Kingma and Ba 2015, section 3).

    Example:
        >>> from hocket_tools.tuning.range_test import smoothed
        >>> [round(average, 3) for average in smoothed([1.0, 1.0, 4.0], beta=0.5)]
        [1.0, 1.0, 2.714]
    """
    average, found = 0.0, []
    for step, loss in enumerate(losses, 1):
        average = beta * average + (1 - beta) * loss
        found.append(average / (1 - beta**step))
    return found


def equal(losses: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a run has the losses of the best one but for noise: on the same batches, 2 standard errors more at most.

    Example:
        >>> from hocket_tools.tuning.range_test import equal
        >>> equal([1.1, 0.9, 1.0], [1.0, 1.0, 0.9]), equal([1.6, 1.5, 1.4], [1.0, 1.0, 0.9])
        (True, False)
    """
    if len(losses) != len(best) or len(losses) < 2:
        return list(losses) == list(best)
    differences = [one - other for one, other in zip(losses, best, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) <= 2 * error


def diverges(losses: Sequence[float]) -> bool:
    """Whether the moving average has risen above the first losses by more than it had fallen below, and beyond their noise.

    The rule depends neither on the unit of the loss nor on its sign.
    """
    if len(losses) <= _FIRST:
        return False
    first = statistics.fmean(losses[:_FIRST])
    average = smoothed(losses)
    fallen = max(first - min(average), 0.0)
    return average[-1] - first > max(fallen, 4 * statistics.pstdev(losses[:_FIRST]), 1e-6 * abs(first))


def centred(losses: Sequence[float]) -> list[float]:
    """Return moving averages without delay: the mean of `smoothed` forwards and backwards."""
    back = smoothed(losses[::-1])[::-1]
    return [(one + other) / 2 for one, other in zip(smoothed(losses), back, strict=True)]


def between(losses: Sequence[float]) -> tuple[int, int] | None:
    """Return the steps after which the loss had fallen by half, and from which on it rose again; None if it did not fall.

    The first is where the moving average has covered half of the way to its minimum. The second is the last step, at or after
    the minimum, up to which it was not more than a tenth of the way back.
    """
    first, most = statistics.fmean(losses[:_FIRST]), max(losses[:_FIRST])
    average = centred([min(loss, most) for loss in losses])  # how far it diverged does not matter
    lowest = min(average)
    fallen = first - lowest
    if fallen <= max(2 * statistics.pstdev(losses[:_FIRST]), 1e-6 * abs(first)):
        return None
    half = next(step for step, loss in enumerate(average) if loss <= lowest + fallen / 2)
    last = at = average.index(lowest)
    for step in range(at, len(average)):
        if average[step] > lowest + fallen / 10:
            break
        last = step
    return half, last
