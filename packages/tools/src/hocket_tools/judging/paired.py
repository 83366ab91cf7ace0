"""Tests of the difference between two runs on the same samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket_tools.arguments import check_least, checked
from hocket_tools.resampling import Estimate, Method, Statistic, bootstrap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hocket_tools.resampling import Floats

_BLOCK = 2_000_000


@dataclass(frozen=True, slots=True)
class Difference:
    """What the second run has more than the first: values of both, their difference with its interval, and a p-value."""

    first: float
    second: float
    difference: Estimate
    p_value: float
    test: str


@checked
def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided mid-p value of McNemar's test: whether two classifiers are right equally often.

    Of the samples that exactly one of them gets right, each does so with probability ½ under the hypothesis. The exact
    conditional test is conservative; the mid-p value counts half the probability of what was observed, and keeps the nominal
    rate (Fagerland, Lydersen and Laake 2013, "The McNemar test for binary matched-pairs data", doi:10.1186/1471-2288-13-91).

    Args:
        first_only, second_only: how many samples only the first, or only the second classifier gets right; 0 or more.

    Raises ValueError for negative numbers.

    Example:
        >>> from hocket_tools import mcnemar
        >>> round(mcnemar(1, 8), 4)  # the exact p is 2 * (1 + 9) / 512 = 0.0391
        0.0215
    """
    check_least(0, 0, first_only=first_only, second_only=second_only)
    import numpy as np

    number, fewer = first_only + second_only, min(first_only, second_only)
    if not number:
        return 1.0
    steps = np.arange(1, fewer + 1)
    # log of C(n, i) / 2^n for i = 0 … fewer
    logs = np.concatenate([[0.0], np.cumsum(np.log((number - steps + 1) / steps))]) - number * np.log(2)
    chances = np.exp(logs)
    return float(min(1.0, 2 * chances.sum() - chances[-1]))


@checked
def paired_test(
    statistic: Statistic, *, level: float = 0.95, resamples: int = 2000, method: Method = "bca", seed: int = 0
) -> Difference:
    """Compare two runs on the same samples: does the second differ from the first?

    Of a proportion, such as accuracy, by McNemar's mid-p test (`mcnemar`); of any other statistic by a permutation test, which
    exchanges the outcomes of the two runs for a random half of the samples, ``resamples`` times (Good 2005, "Permutation,
    Parametric and Bootstrap Tests of Hypotheses", section 3.7). The interval of the difference is that of `bootstrap`, which
    draws pairs.

    Args:
        statistic: of both runs: ``rows`` has the samples of the first run, and then the same ones, in the same order, of the
            second.
        level, resamples, method, seed: see `bootstrap`.

    Raises ValueError for an odd number of rows.

    Example:
        >>> import numpy
        >>> from hocket_tools import Statistic, paired_test
        >>> losses = numpy.random.default_rng(0).exponential(size=(2, 300))  # of two runs
        >>> losses[1] += 0.5
        >>> both = losses.ravel()
        >>> mean = Statistic("loss", numpy.arange(600), lambda weights: weights @ both / weights.sum(1))
        >>> found = paired_test(mean)
        >>> found.difference.low > 0, found.p_value < 0.01
        (True, True)
    """
    import numpy as np

    if len(statistic.rows) % 2:
        raise WrongValue(f"paired_test was given {len(statistic.rows)} samples, which are not those of two runs.")
    samples = len(statistic.rows) // 2
    kinds = len(statistic.counts)
    sides = statistic.rows[:samples], statistic.rows[samples:]
    pairs, of_pair = np.unique(np.stack(sides, 1), axis=0, return_inverse=True)
    of_pair = of_pair.reshape(-1)  # numpy 2.0 has another shape
    to_first, to_second = (_Spread(pairs[:, side], kinds) for side in (0, 1))

    def difference(weights: Floats) -> Floats:
        return statistic.value(to_second(weights)) - statistic.value(to_first(weights))

    first, second = (
        float(statistic.value(np.bincount(side, minlength=kinds)[None].astype(float))[0]) for side in sides
    )
    between = Statistic(statistic.name, of_pair, difference)
    estimate = bootstrap(between, level=level, resamples=resamples, method=method, seed=seed)
    if statistic.proportion:
        right = statistic.value(np.eye(kinds))[pairs] > 0.5
        counts = between.counts
        only = [int(counts[right[:, side] & ~right[:, 1 - side]].sum()) for side in (0, 1)]
        return Difference(first, second, estimate, mcnemar(*only), "McNemar, mid-p")
    p_value = _permuted(statistic, between, (to_first, to_second), resamples, np.random.default_rng([seed, 1]))
    return Difference(first, second, estimate, p_value, "permutation")


def _permuted(
    statistic: Statistic,
    between: Statistic,
    spreads: tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]],
    resamples: int,
    generator: Any,
) -> float:
    """Return the share of exchanges whose difference is at least as large as the observed one, itself included."""
    import numpy as np

    counts = between.counts
    observed = abs(float(between.value(counts[None].astype(np.float64))[0]))
    if observed != observed:
        return float("nan")
    first, second = spreads
    size, extreme, known = max(1, _BLOCK // len(counts)), 1, 1
    for start in range(0, resamples, size):
        number = min(size, resamples - start)
        exchanged = generator.binomial(counts, 0.5, (number, len(counts))).astype(np.float64)
        kept = counts - exchanged
        found = np.abs(
            statistic.value(second(kept) + first(exchanged)) - statistic.value(first(kept) + second(exchanged))
        )
        found = found[~np.isnan(found)]
        extreme += int(np.count_nonzero(found >= observed - 1e-12 * max(observed, 1.0)))
        known += len(found)
    return extreme / known


class _Spread:
    """Weights ``(sets, pairs)`` as weights ``(sets, kinds)`` of the kinds that one side of the pairs has."""

    def __init__(self, kind_of_pair: NDArray[Any], kinds: int) -> None:
        import numpy as np

        self._order = np.argsort(kind_of_pair, kind="stable")
        self._there, self._starts = np.unique(kind_of_pair[self._order], return_index=True)
        self._kinds = kinds

    def __call__(self, weights: Floats) -> Floats:
        import numpy as np

        spread = np.zeros((len(weights), self._kinds))
        ordered = weights[:, self._order]
        unique = len(self._starts) == len(self._order)
        spread[:, self._there] = ordered if unique else np.add.reduceat(ordered, self._starts, axis=1)
        return spread
