"""Intervals and paired tests, against their definitions, scikit-learn, scipy, and simulations of known truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket_tools import Statistic, bootstrap, mcnemar, paired_test
from hocket_tools.judging.samples import Samples, joined, per_class, statistic

stats = pytest.importorskip("scipy.stats")
sklearn_metrics = pytest.importorskip("sklearn.metrics")


def classified(targets: Any, predicted: Any, classes: int = 3, losses: Any = None) -> Samples:
    pairs = np.zeros((0, 2)) if losses is None else np.stack([losses, np.ones(len(losses))], 1)
    return Samples(pairs, np.asarray(targets), np.asarray(predicted), np.zeros((0, 3)), classes)


def predicted_by(generator: np.random.Generator, targets: Any, right: float) -> Any:
    """Predictions that are right with a probability, and else of another class."""
    wrong = (targets + generator.integers(1, 3, size=len(targets))) % 3
    return np.where(generator.random(len(targets)) < right, targets, wrong)


def drawn(generator: np.random.Generator, samples: int, right: float) -> tuple[Any, Any]:
    """Targets of three classes, and predictions."""
    targets = generator.integers(3, size=samples)
    return targets, predicted_by(generator, targets, right)


def mean_of(values: Any) -> Statistic:
    return Statistic("loss", np.arange(len(values)), lambda weights: weights @ values / weights.sum(1))


# --- values


@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_of_scikit_learn(seed: int) -> None:
    targets, predicted = drawn(np.random.default_rng(seed), 40 if seed else 7, 0.6)
    if seed == 3:
        targets = np.where(targets == 2, 0, targets)  # a class that is predicted and no target
    found = classified(targets, predicted, 4)
    macro = {"average": "macro", "zero_division": 0}
    expected = {
        "accuracy": sklearn_metrics.accuracy_score(targets, predicted),
        "precision": sklearn_metrics.precision_score(targets, predicted, **macro),
        "recall": sklearn_metrics.recall_score(targets, predicted, **macro),
        "f1": sklearn_metrics.f1_score(targets, predicted, **macro),
        "balanced-accuracy": np.mean([(predicted == each)[targets == each].mean() for each in np.unique(targets)]),
    }
    for name, value in expected.items():
        assert bootstrap(statistic(found, name), resamples=100).value == pytest.approx(value), name
    assert found.confusion().tolist() == sklearn_metrics.confusion_matrix(targets, predicted, labels=range(4)).tolist()
    rows = per_class(found.confusion())
    of_all = sklearn_metrics.precision_recall_fscore_support(targets, predicted, labels=range(4), zero_division=0)
    assert np.allclose([[row[name] for row in rows] for name in ("precision", "recall", "f1", "support")], of_all)


def test_masks_count_each_label_and_omit_ignored_ones() -> None:
    generator = np.random.default_rng(0)
    targets, predicted = generator.integers(-1, 3, size=(20, 4, 5)), generator.integers(3, size=(20, 4, 5))
    found = classified(targets, predicted)
    known = targets >= 0
    assert bootstrap(statistic(found, "accuracy")).value == pytest.approx((targets == predicted)[known].mean())
    f1 = sklearn_metrics.f1_score(targets[known], predicted[known], average="macro")
    assert bootstrap(statistic(found, "f1")).value == pytest.approx(f1)
    flat = classified(targets.reshape(-1), predicted.reshape(-1))
    assert bootstrap(statistic(flat, "f1")).value == pytest.approx(f1)
    assert bootstrap(statistic(flat, "accuracy")).value == pytest.approx((targets == predicted)[known].mean())


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_intervals_are_those_of_scipy(method: Any) -> None:
    losses = np.random.default_rng(0).exponential(size=150)
    ours = bootstrap(mean_of(losses), resamples=20_000, method=method)
    theirs = stats.bootstrap((losses,), np.mean, n_resamples=20_000, method=method.replace("bca", "BCa"), rng=1)
    low, high = theirs.confidence_interval
    assert ours.low == pytest.approx(low, abs=0.008) and ours.high == pytest.approx(high, abs=0.008)


def test_resampling_kinds_and_samples_gives_the_same_interval() -> None:
    right = np.random.default_rng(0).random(400) < 0.8
    by_kind = bootstrap(Statistic("a", right.astype(int), lambda w: w[:, 1] / w.sum(1)), resamples=20_000)
    one_by_one = bootstrap(mean_of(right.astype(float)), resamples=20_000)
    assert by_kind.value == one_by_one.value
    assert by_kind.low == pytest.approx(one_by_one.low, abs=0.003)
    assert by_kind.high == pytest.approx(one_by_one.high, abs=0.003)


def test_the_acceleration_of_groups_is_near_that_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket_tools import resampling as module

    statistic_ = mean_of(np.random.default_rng(0).exponential(size=3000))
    grouped = module._acceleration(statistic_, statistic_.counts)
    monkeypatch.setattr(module, "_GROUPS", 3000)
    assert grouped == pytest.approx(module._acceleration(statistic_, statistic_.counts), rel=0.3)


def test_a_seed_decides_and_edges_are_said() -> None:
    losses = np.random.default_rng(0).exponential(size=150)
    assert (
        bootstrap(mean_of(losses), seed=3) == bootstrap(mean_of(losses), seed=3) != bootstrap(mean_of(losses), seed=4)
    )
    perfect = bootstrap(statistic(classified([0, 1, 2] * 10, [0, 1, 2] * 10), "accuracy"))
    assert (perfect.value, perfect.high) == (1, 1) and "Wilson" in perfect.note
    assert perfect.low == pytest.approx(stats.binomtest(30, 30).proportion_ci(method="wilson").low)
    for few in ([0], [0, 1, 2]):
        single = bootstrap(statistic(classified(few, few), "f1"))
        assert single.value == 1 and np.isnan([single.low, single.high]).all() and f"has {len(few)}" in single.note
    alike = bootstrap(statistic(classified([0, 1, 2] * 10, [0, 1, 2] * 10), "f1"))
    assert alike.value == 1 and np.isnan([alike.low, alike.high]).all() and "equal in all resamples" in alike.note
    with pytest.raises(ValueError, match="level=2"):
        bootstrap(mean_of(losses), level=2)
    with pytest.raises(ValueError, match="resamples=7"):
        bootstrap(mean_of(losses), resamples=7)
    with pytest.raises(ValueError, match="needs numbers as outputs"):
        statistic(classified([0], [0]), "mae")


# --- tests of a difference


def test_mcnemar_is_the_exact_test_less_half_the_probability_of_the_outcome() -> None:
    for first, second in ((1, 8), (0, 5), (12, 30), (40, 41), (0, 0), (3, 3), (900, 1000)):
        number, fewer = first + second, min(first, second)
        exact = stats.binomtest(first, number).pvalue if number else 1.0
        less = stats.binom.pmf(fewer, number, 0.5) if first != second else 0
        assert mcnemar(first, second) == pytest.approx(exact - less, abs=1e-12)


def test_a_permutation_test_is_that_of_scipy() -> None:
    generator = np.random.default_rng(0)
    losses = generator.exponential(size=(2, 60))
    losses[1] += 0.15
    ours = paired_test(mean_of(losses.ravel()), resamples=20_000)

    def difference(first: Any, second: Any, axis: int) -> Any:
        return second.mean(axis) - first.mean(axis)

    theirs = stats.permutation_test(
        (losses[0], losses[1]), difference, permutation_type="samples", n_resamples=20_000, vectorized=True, rng=1
    )
    assert ours.difference.value == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=0.015)


def test_pairs_of_classes_are_counted_as_their_samples_are() -> None:
    generator = np.random.default_rng(1)
    targets, first = drawn(generator, 120, 0.7)
    second = np.where(generator.random(120) < 0.2, targets, first)
    both = joined(classified(targets, first), classified(targets, second))
    found = paired_test(statistic(both, "f1"), resamples=4000)
    assert found.first == pytest.approx(sklearn_metrics.f1_score(targets, first, average="macro"))
    assert found.second == pytest.approx(sklearn_metrics.f1_score(targets, second, average="macro"))
    exchanged = generator.random((1000, 120)) < 0.5
    drawn_ = [
        [
            sklearn_metrics.f1_score(targets, np.where(swap, *sides), average="macro")
            for sides in ((first, second), (second, first))
        ]
        for swap in exchanged[:250]
    ]
    p_value = np.mean(np.abs(np.diff(drawn_)) >= abs(found.second - found.first) - 1e-12)
    assert found.p_value == pytest.approx(p_value, abs=0.03)
    accuracy = paired_test(statistic(both, "accuracy"))
    only = [int(((a == targets) & (b != targets)).sum()) for a, b in ((first, second), (second, first))]
    assert accuracy.p_value == mcnemar(*only) and accuracy.test == "McNemar, mid-p"
    with pytest.raises(ValueError, match="not paired"):
        joined(classified(targets, first), classified(targets[::-1], second))


# --- simulations


def coverage(make: Callable[[np.random.Generator], Statistic], truth: float, times: int, method: Any) -> float:
    generator, inside = np.random.default_rng(5), 0
    for each in range(times):
        found = bootstrap(make(generator), resamples=1000, method=method, seed=each)
        inside += found.low <= truth <= found.high
    return inside / times


def accuracy_of(generator: np.random.Generator) -> Statistic:
    return statistic(classified(*drawn(generator, 400, 0.8)), "accuracy")


def f1_of(generator: np.random.Generator) -> Statistic:
    return statistic(classified(*drawn(generator, 400, 0.8)), "f1")


def loss_of(generator: np.random.Generator) -> Statistic:
    return mean_of(generator.gamma(1.5, size=300))


#: The expected values: classes are balanced, and errors fall on both other classes equally, so precision is recall.
TRUTH = {accuracy_of: 0.8, f1_of: 0.8, loss_of: 1.5}


@pytest.mark.parametrize("make", TRUTH)
def test_intervals_cover_the_truth(make: Any) -> None:
    assert 0.92 <= coverage(make, TRUTH[make], 250, "bca") <= 0.985


@pytest.mark.long
@pytest.mark.parametrize("method", ["bca", "percentile"])
@pytest.mark.parametrize("make", TRUTH)
def test_intervals_cover_the_truth_in_95_percent(make: Any, method: Any) -> None:
    found = coverage(make, TRUTH[make], 600 if make is loss_of else 1000, method)
    print(f"coverage of {make.__name__} {method}: {found}")
    assert 0.93 <= found <= 0.97


def false_positives(name: str, times: int, samples: int = 200, resamples: int = 399) -> float:
    generator, found = np.random.default_rng(7), 0
    for each in range(times):
        targets, common = drawn(generator, samples, 0.8)
        alike = generator.random(samples) < 0.6  # on which two models of one quality agree
        first, second = (np.where(alike, common, predicted_by(generator, targets, 0.8)) for _ in range(2))
        if name == "loss":
            losses = generator.exponential(size=(2, samples)) + generator.exponential(size=samples)
            tested = mean_of(losses.ravel())
        else:
            tested = statistic(joined(classified(targets, first), classified(targets, second)), name)
        found += paired_test(tested, resamples=resamples, method="percentile", seed=each).p_value <= 0.05
    return found / times


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_equal_runs_seldom_differ(name: str) -> None:
    assert 0.02 <= false_positives(name, 250, 100, 199) <= 0.085


@pytest.mark.long
@pytest.mark.parametrize("name", ["accuracy", "loss", "f1"])
def test_equal_runs_differ_in_5_percent(name: str) -> None:
    times, resamples = (2000, 100) if name == "accuracy" else (1000, 299)
    found = false_positives(name, times, resamples=resamples)
    print(f"false positives of {name}: {found}")
    assert 0.035 <= found <= 0.065
