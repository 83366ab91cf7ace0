"""benchmarks/: every algorithm is compared, with a loop by hand that does the same; intervals; verdicts."""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

for package in ("hocket_general", "hocket_vision", "hocket_nlp"):
    pytest.importorskip(package)
FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULES = ("harness", "hand_loops", "by_hand", "functional", "contenders")
#: Algorithms that draw random numbers, which a loop by hand draws in another order.
RANDOM = {
    "alternating-flip", "augmix", "colout", "cutmix", "cutout", "gyro-dropout", "mixup", "randaugment", "selective-backprop",
    "squeeze-excite", "stochastic-depth",
}  # fmt: skip
#: Loops whose sums are rounded in another order.
TOLERANCES = {"label-smoothing": 1e-4, "sam": 1e-4}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(FOLDER))
    for name in {name for name in sys.modules if name.partition(".")[0] in MODULES} - before:
        del sys.modules[name]


def test_every_algorithm_has_a_loop_by_hand_or_a_reason(bench: Any) -> None:
    assert sorted([*bench.hand_loops.CASES, *bench.hand_loops.WITHOUT]) == bench.by_hand.names()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:GhostBatchNorm has no effect")
def test_loops_by_hand_do_the_same(bench: Any) -> None:
    assert RANDOM | TOLERANCES.keys() < bench.hand_loops.CASES.keys()
    different = {}
    for name in bench.hand_loops.CASES.keys() - RANDOM:
        case = bench.hand_loops.CASES[name]
        bed = bench.hand_loops.BEDS[case.bed]
        make = {"texts": bench.hand_loops.texts, "documents": bench.hand_loops.documents}.get(
            case.bed.partition(",")[0]
        )
        batches = make(3, 3, 8) if make else bench.hand_loops.images(3, 8, 16)
        torch.manual_seed(0)
        model = bed.model()
        own = bench.by_hand.fit(name, case, bed, copy.deepcopy(model), bench.by_hand.Watch(batches)).state_dict()
        for loop in case.loops:
            other = copy.deepcopy(model)
            loop(other, bench.by_hand.Watch(batches))
            found = other.state_dict()
            assert found.keys() == own.keys(), name
            if any(
                not torch.allclose(own[key], value, rtol=0, atol=TOLERANCES.get(name, 1e-6))
                for key, value in found.items()
            ):
                different[name] = loop
    assert not different


def test_random_loops_change_batches_alike_but_for_the_draws(bench: Any) -> None:
    """Shapes, and how much of the pixels is changed, as a mean over many batches."""
    batches = bench.hand_loops.images(1, 64, 16)
    images, labels, _ = batches[0]
    torch.manual_seed(0)
    assert bench.hand_loops.colout(images, labels)[0].shape == (64, 3, 13, 13)
    hidden = [
        [float((change(images + 1, labels)[0] == 0).float().mean()) for _ in range(20)]
        for change in (
            bench.hand_loops.cutout,
            bench.hand_loops.cutout_by_mask,
            lambda images, labels: (bench.hand_loops.vf.cutout(images), labels),
        )
    ]
    means = [sum(each) / len(each) for each in hidden]
    assert max(means) - min(means) < 0.01 < min(means)
    mixed, (first, second, share) = bench.hand_loops.cutmix(images, labels)
    assert float((mixed == images).float().mean()) >= share - 1e-6 and torch.equal(first, labels)
    mixed, (first, second, share) = bench.hand_loops.mixup(images, labels)
    assert mixed.shape == images.shape and 0 <= share <= 1 and second.shape == labels.shape


def test_the_interval_of_a_median_is_that_of_the_binomial_table(bench: Any) -> None:
    interval = bench.harness.median_interval
    # For n = 10 the second and the ninth value hold the median with 97.9 %, for n = 20 the 6th and the 15th with 95.9 %.
    assert interval([float(each) for each in range(10)]) == (1.0, 8.0)
    assert interval([float(each) for each in reversed(range(20))]) == (5.0, 14.0)
    for count in range(6, 40):
        low, high = interval([float(each) for each in range(count)])
        below = [sum(math.comb(count, k) for k in range(int(at) + 1)) / 2**count for at in (low, low + 1)]
        assert low + high == count - 1 and 1 - 2 * below[0] >= 0.95 > 1 - 2 * below[1]


def test_a_comparison_is_with_the_fastest_loop_and_settles(bench: Any) -> None:
    compared = bench.by_hand.Comparison([1.0] * 6, [[2.0] * 6, [0.5] * 6])
    assert compared.ratios == [2.0] * 6 and compared.settled(1.1) and compared.settled(3.0)
    assert not bench.by_hand.Comparison([1.0, 2.0] * 3, [[1.0] * 6]).settled(1.5)


def test_algorithms_above_the_limit_are_named(bench: Any, monkeypatch: Any, capsys: Any) -> None:
    def compare(name: str, *arguments: Any) -> Any:
        return bench.by_hand.Comparison([2.0 if name == "sam" else 1.0] * 6, [[1.0] * 6])

    monkeypatch.setattr(bench.by_hand, "compare", compare)
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        found = bench.by_hand.run()
    torch.set_num_threads(threads)
    assert found["above"] == ["sam: 2.00 of the loop by hand, at most 1.1"]
    lines = found["table"].splitlines()
    assert [line for line in lines if "ABOVE" in line] == ["| sam | 2.00 | 2.00 to 2.00 | 1,000 ± 0 | ABOVE |"]
    assert any(line.startswith("| no-op-model |") and "not compared" in line for line in lines)
    monkeypatch.setattr(sys, "argv", ["by_hand.py", "sam"])
    assert bench.by_hand.main() == 1
    monkeypatch.setattr(sys, "argv", ["by_hand.py", "ema"])
    assert bench.by_hand.main() == 0
    monkeypatch.setattr(sys, "argv", ["by_hand.py", "emma"])
    with pytest.raises(SystemExit):
        bench.by_hand.main()
    assert "emma: not an algorithm. There are activation-checkpointing," in capsys.readouterr().err


def test_functional_forms_above_composers_limit_are_named(bench: Any) -> None:
    cells, above = bench.functional.compare("randaugment", [0.4, 0.6, 0.7])
    assert cells == ["0.60", "0.40 to 0.70", "0.5: ABOVE"]
    assert above == ["randaugment: 0.60 of Composer's time, at most 0.5"]
    assert bench.functional.compare("blurpool", [0.8] * 3) == (["0.80", "0.80 to 0.80", "0.85"], [])
    assert bench.functional.compare("blurpool, channels-last", [2.0] * 3)[1] == []


@pytest.mark.long
def test_functional_forms_are_measured_in_processes_of_their_own(bench: Any) -> None:
    found = bench.functional.run(None, repeats=2, batch=2, side=16, only=["cutmix", "blurpool, channels-last"])
    assert found["table"].splitlines()[0] == "| 2 × 3 × 16 × 16, 2 threads | hocket, ms |" and found["above"] == []
    assert all(len(each["hocket"]) == 2 and min(each["hocket"]) > 0 for each in found["ms"].values())
    assert list(found["ms"]) == ["cutmix", "blurpool, channels-last"]


def test_the_interval_of_changes_counts_images_and_fits(bench: Any) -> None:
    np, stats = pytest.importorskip("numpy"), pytest.importorskip("scipy.stats")
    pytest.importorskip("sklearn")
    smaller_models = importlib.import_module("smaller_models")
    generator = np.random.default_rng(0)

    fits = generator.normal(size=8)  # each image once, all of a fit alike: only fits count
    found = smaller_models.interval([np.full(5, each) for each in fits], np.split(np.arange(40), 8))
    expected = stats.t.interval(0.95, 7, fits.mean(), stats.sem(fits))
    assert found == pytest.approx((fits.mean(), *expected))

    covered = 0
    for _ in range(200):  # 6 divisions of 100 images into 5 folds; images, fits and their combinations vary
        by_image, images, changes = generator.normal(size=100), [], []
        for _ in range(6):
            for fold in np.split(generator.permutation(100), 5):
                images.append(fold)
                changes.append(by_image[fold] + 0.3 * generator.normal() + generator.normal(size=20))
        _, low, high = smaller_models.interval(changes, images)
        covered += low < 0 < high
    assert 0.9 <= covered / 200 <= 0.99
