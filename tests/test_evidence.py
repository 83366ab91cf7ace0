"""benchmarks/evidence: statistics, verdicts, settings, pages; and a toy run from data to tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sklearn")
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The modules, which write into a temporary folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    from evidence import __main__, measure, ngrams, pages, pairs, publish, rows, run, tasks, tune

    monkeypatch.setattr(run, "FILE", tmp_path / "evidence.jsonl")
    monkeypatch.setattr(tune, "FILE", tmp_path / "tuned.json")
    monkeypatch.setattr(publish, "DOCS", tmp_path)
    yield SimpleNamespace(
        main=__main__.main, measure=measure, ngrams=ngrams, pages=pages, pairs=pairs, publish=publish, rows=rows, run=run,
        tasks=tasks, tune=tune,
    )  # fmt: skip
    for name in {name for name in sys.modules if name.partition(".")[0] in ("evidence", "harness")} - before:
        del sys.modules[name]


def set_baseline(evidence: Any, duration: str, **others: Any) -> None:
    """Write down what the baseline of digits would have been tuned to."""
    task = evidence.tasks.TASKS["digits"]
    settings = evidence.tune.settings_of(task, evidence.rows.Row("plain", grid=task.grid), {})
    record = {"settings": settings, "seeds": [], "points": [], "chosen": {"lr": 3e-3, "duration": duration}}
    evidence.tune.FILE.write_text(json.dumps({"digits": {"plain": record, **others}}))


def pair(seed: int, plain: float, row: float, seconds: float = 1.0, memory: float = 10.0) -> dict[str, Any]:
    """Runs of ten steps that are evaluated twice."""

    def one(quality: float, seconds: float, memory: float) -> dict[str, Any]:
        curve = [(5, seconds / 2, quality / 2), (10, seconds, quality)]
        return {
            "quality": quality, "curve": curve, "seconds": seconds, "steps": 10, "step_us": seconds * 1e5, "peak_mib": memory,
            "warned": [],
        }  # fmt: skip

    return {"seed": seed, "plain": one(plain, 1.0, 10.0), "row": one(row, seconds, memory)}


def test_an_interval_is_that_of_students_t_test(evidence: Any) -> None:
    # Fisher 1925, "Statistical Methods for Research Workers", section 24: additional hours of sleep of ten patients.
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    around = evidence.pairs.interval(sleep)
    assert around.mean == pytest.approx(1.58)
    assert (around.low, around.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)  # R: t.test(sleep)
    assert 0.71 in around and 0.69 not in around
    with pytest.raises(ValueError, match="at least two"):
        evidence.pairs.interval([1.0])
    ratio = evidence.pairs.ratio_interval([0.5, 2.0])
    assert ratio.mean == pytest.approx(1) and ratio.low == pytest.approx(1 / ratio.high)


def test_95_percent_of_repetitions_are_expected_and_fewer_are_within_the_interval(evidence: Any) -> None:
    import torch

    draws = torch.randn(1000, 2, 5, generator=torch.Generator().manual_seed(0)).tolist()
    within = expected = 0
    for first, second in draws:
        around, mean = evidence.pairs.interval(first), sum(second) / 5
        within += mean in around
        expected += around.expects(mean, 5)
    assert 930 <= expected <= 970
    assert 830 <= within <= 905


def test_a_summary_pairs_by_seed_and_turns_lower_is_better(evidence: Any) -> None:
    found = [pair(1, 90.0, 91.0, 2.0, 5.0), pair(2, 80.0, 83.0, 2.0, 5.0), pair(3, 70.0, 72.0, 2.0, 5.0)]
    cell = evidence.pairs.summary(found, True)
    assert cell["gain"]["mean"] == pytest.approx(2) and cell["gain"]["deviation"] == pytest.approx(1)
    assert cell["gain"]["low"] == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)  # t(0.975, 2)
    assert cell["cost"] == cell["time"]["mean"] == pytest.approx(2) and cell["memory"]["mean"] == pytest.approx(0.5)
    assert cell["plain"]["mean"] == 80 and cell["to_target"] == 2
    turned = evidence.pairs.summary(found, False)
    assert turned["gain"]["mean"] == pytest.approx(-2) and turned["to_target"] == 2  # of both at the first evaluation
    never = evidence.pairs.summary([pair(1, 90.0, 89.0), pair(2, 80.0, 79.0)], True)
    assert never["to_target"] is None


def test_the_time_to_a_target_is_that_of_the_mean_over_seeds(evidence: Any) -> None:
    curves = [[(1, 1.0, 50.0), (2, 2.0, 100.0)], [(1, 3.0, 90.0), (2, 6.0, 96.0)]]
    assert evidence.pairs.time_to(70.0, curves, True) == 2
    assert evidence.pairs.time_to(71.0, curves, True) == 4
    assert evidence.pairs.time_to(99.0, curves, True) is None


def noise(*shape: int, seed: int = 0) -> list[Any]:
    import torch

    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).tolist()


def test_p_values_are_those_of_scipys_t_test(evidence: Any) -> None:
    from scipy.stats import ttest_1samp

    for values in noise(20, 5):
        expected = ttest_1samp(values, 0.3).pvalue
        assert evidence.pairs.p_value(asdict(evidence.pairs.interval(values)), 0.3) == pytest.approx(expected)
        ratios = [math.exp(value / 10) for value in values]
        expected = ttest_1samp([math.log(ratio) for ratio in ratios], math.log(0.9)).pvalue
        around = asdict(evidence.pairs.ratio_interval(ratios))
        assert evidence.pairs.p_value(around, 0.9, ratio=True) == pytest.approx(expected)
    same = asdict(evidence.pairs.interval([0.5, 0.5, 0.5]))
    assert evidence.pairs.p_value(same, 0.5) == 1 and evidence.pairs.p_value(same) == 0


def test_the_correction_is_that_of_benjamini_and_hochberg(evidence: Any) -> None:
    from scipy.stats import false_discovery_control

    adjusted = evidence.pairs.benjamini_hochberg
    # Their example, 1995, section 3.2: of 15 endpoints the four smallest are rejected at 5 %, where Bonferroni rejects three.
    example = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    example += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    assert [value <= 0.05 for value in adjusted(example)] == [True] * 4 + [False] * 11
    many = ([abs(value) % 1 for value in row] for row in noise(20, 84))
    for values in ([0.2], [0.5, 0.5, 0.01, 0.01], [0.0, 1.0, 1.0], *many):
        assert adjusted(values) == pytest.approx(list(false_discovery_control(values)))
    assert adjusted([]) == []


def test_what_a_number_of_seeds_can_show(evidence: Any) -> None:
    from scipy.stats import ttest_1samp

    effect = evidence.pairs.detectable(5)
    found = ttest_1samp([[value + effect for value in row] for row in noise(20_000, 5)], 0, axis=1).pvalue <= 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    assert evidence.pairs.power(0.0, 5) == pytest.approx(0.05)
    assert evidence.pairs.detectable(5, 0.005) > effect > evidence.pairs.detectable(10)


def judged_cell(evidence: Any, gains: list[float], times: float = 1.0, memory: float = 1.0) -> dict[str, Any]:
    """A summary of pairs with these gains."""
    found = [
        pair(seed, 90.0, 90.0 + gain, times * (1 + seed / 1e4), 10 * memory * (1 + seed / 1e4))
        for seed, gain in enumerate(gains)
    ]
    return evidence.pairs.summary(found, True)  # type: ignore[no-any-return]


def test_of_many_comparisons_only_what_remains_after_the_correction_is_claimed(evidence: Any) -> None:
    from scipy.stats import false_discovery_control, ttest_1samp

    gains = [*noise(83, 5, seed=3), [3.0, 3.1, 2.9, 3.05, 2.95]]
    entries = {str(number): {"cells": {"a": judged_cell(evidence, each)}} for number, each in enumerate(gains)}
    evidence.pairs.judge(entries, {"a": 0.5})
    p_values = [ttest_1samp(each, 0).pvalue for each in gains]
    remain = false_discovery_control(p_values) <= 0.05
    assert sum(p < 0.05 for p in p_values) > sum(remain) == 1
    for number, (each, real) in enumerate(zip(gains, remain, strict=True)):
        entry = entries[str(number)]
        assert ("better" in entry["why"] or "worse" in entry["why"]) == real
        as_good = ttest_1samp(each, -0.5, alternative="greater").pvalue <= 0.025
        assert entry["cells"]["a"]["as_good"] == as_good
    lucky = next(each for each, p in zip(gains, p_values, strict=True) if p < 0.05)
    alone = {"row": {"cells": {"a": judged_cell(evidence, lucky)}}}
    evidence.pairs.judge(alone, {"a": 0.5})
    assert "no difference" not in alone["row"]["why"]  # one comparison needs no correction


SURE, UNSURE, LOSS = [1.0, 1.1, 0.9, 1.05, 0.95], [1.0, -1.0, 0.8, -0.8, 0.1], [-1.0, -1.1, -0.9, -1.05, -0.95]
SAME = [0.1, -0.1, 0.05, -0.05, 0.0]


@pytest.mark.parametrize(
    ("cells", "symbol", "reason"),
    [
        ([(SURE,)], "✅", "better on a"),
        ([(SURE, 1.5)], "🚧", "better on a; 1.50 times the cost of a step"),
        ([(SAME, 0.9)], "✅", "faster on a"),
        ([(SAME, 0.9), (UNSURE,)], "🚧", "faster on a; a loss is not excluded on b"),
        ([(SURE,), (SAME,)], "✅", "better on a"),
        ([(SURE,), (UNSURE,)], "🚧", "better on a; a loss is not excluded on b"),
        ([(SURE,), (LOSS,)], "🚧", "better on a; worse on b"),
        ([(UNSURE, 0.9)], "❗", "no difference was shown"),
        ([(SAME, 1.0, 0.5)], "🚧", "less memory on a"),
        ([(SAME, 1.0, 0.5), (LOSS,)], "❗", "worse on b; less memory on a"),
        ([(SAME,)], "❗", "no difference was shown"),
        ([{"error": "ValueError: no"}], "", "not measured"),
        ([(SURE,), {"error": "ValueError: no"}], "✅", "better on a"),
    ],
)
def test_the_verdict_follows_from_all_cells(evidence: Any, cells: list[Any], symbol: str, reason: str) -> None:
    found = [each if isinstance(each, dict) else judged_cell(evidence, *each) for each in cells]
    for each in found:  # a gain at the end of training is no quicker way to the target
        each["to_target"] = None
    entries = {"row": {"cells": dict(zip("abc", found, strict=False))}}
    evidence.pairs.judge(entries, dict.fromkeys("abc", 0.3))
    assert (entries["row"]["verdict"], entries["row"]["why"]) == (symbol, reason)


def test_a_dear_method_that_reaches_the_target_sooner_is_worth_it(evidence: Any) -> None:
    entries = {"row": {"cells": {"a": judged_cell(evidence, SURE, 1.5) | {"to_target": 0.8}}}}
    evidence.pairs.judge(entries, {"a": 0.3})
    assert entries["row"]["verdict"] == "✅"


def test_a_method_without_an_effect_is_no_comparison(evidence: Any) -> None:
    without = judged_cell(evidence, SURE) | {"warned": ["SWA averages nothing"]}
    cells = {"a": without, "b": judged_cell(evidence, SURE)}
    entries = {"swa": {"cells": cells}, "other": {"cells": {"a": dict(without)}}}
    evidence.pairs.judge(entries, dict.fromkeys("ab", 0.3))
    assert entries["swa"]["why"].endswith("; no effect on a") and "adjusted" not in cells["a"]
    assert (entries["other"]["verdict"], entries["other"]["why"]) == ("", "no effect on a")
    assert evidence.pages.gain(cells["a"]) == "no effect"


def results_of(evidence: Any, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of a run that measured these cells by row and task."""
    task = {"margin": 0.3, "values": [90.0, 91.0], "settings": "x", "grid": {"lr": [0.1], "duration": ["1ep"]}}
    entries = {name: {"settings": "s", "at_edge": [], "cells": cells} for name, cells in rows.items()}
    tasks = {name: dict(task) for name in ("digits", "mnist5k", "stdlib-chars")}
    origin = {"machine": {"cpu": "c"}, "versions": {"torch": "1"}, "commits": ["new"], "seeds": [1, 2, 3, 4, 5]}
    return evidence.publish.judged({**origin, "tasks": tasks, "rows": entries, "recipes": {}})  # type: ignore[no-any-return]


def test_rows_that_are_measured_again_replace_theirs_and_are_named(evidence: Any) -> None:
    def cell(gains: list[float], time: float = 1.0) -> dict[str, Any]:
        return judged_cell(evidence, gains, time)

    before = results_of(
        evidence, {"a": {"digits": cell(SAME, 0.9), "mnist5k": cell(SAME)}, "b": {"digits": cell(LOSS)}}
    )
    before = json.loads(json.dumps(before)) | {"commits": ["old"]}
    assert before["rows"]["a"]["verdict"] == "✅"
    known = {name: evidence.rows.Row(name, ("digits",)) for name in "abc"}
    new = results_of(evidence, {"a": {"digits": cell(SAME)}, "c": {"digits": cell(SURE)}})
    found = evidence.publish.merged(before, new, known)
    assert found["commits"] == ["old"] and list(found["rows"]) == ["a", "b", "c"]
    assert found["rows"]["a"]["cells"].keys() == {"digits"}  # rows.yaml no longer asks for the other task
    assert found["rows"]["a"]["verdict"] == "❗" and found["rows"]["a"]["cells"]["digits"]["measured"]["commits"] == [
        "new"
    ]
    assert "measured" not in found["rows"]["b"]["cells"]["digits"] and found["rows"]["c"]["why"] == "better on digits"
    told = evidence.pages._measured_again(found["rows"])
    assert "a on digits, c on digits (commit new" in told and "b on digits" not in told
    everything = results_of(evidence, {"a": {"digits": cell(SAME)}, "b": {"digits": cell(SAME)}})
    assert evidence.publish.merged(before, everything, known) == everything
    assert evidence.publish.merged({}, new, known) == new


def test_times_beside_other_programs_are_neither_claimed_nor_shown(evidence: Any) -> None:
    before = results_of(
        evidence, {"a": {"digits": judged_cell(evidence, SAME, 0.9)}, "b": {"digits": judged_cell(evidence, SAME)}}
    )
    new = results_of(evidence, {"a": {"digits": judged_cell(evidence, SURE, 0.9)}})
    known = {name: evidence.rows.Row(name, ("digits",)) for name in "ab"}
    entry = evidence.publish.merged(before, new, known, untimed=True)["rows"]["a"]
    assert (entry["verdict"], entry["why"]) == ("🚧", "better on digits; the cost was not measured on digits")
    assert (
        "time" not in entry["cells"]["digits"]["adjusted"]
        and evidence.pages._times(entry["cells"]["digits"])[0] == "not timed"
    )
    entry = evidence.publish.merged(before, new, known)["rows"]["a"]
    assert (entry["verdict"], entry["why"]) == ("✅", "better on digits; faster on digits")


def test_published_verdicts_and_pages_are_those_of_the_measurements(evidence: Any, tmp_path: Path) -> None:
    """Neither a verdict nor a page, nor the head of a card, is older than docs/evidence/results.json."""
    docs = FOLDER.parent / "docs"
    found = json.loads((docs / "evidence" / "results.json").read_text())
    assert_equal(found, evidence.publish.judged(found))
    for folder in ("algorithms", "explanation"):
        (tmp_path / folder).mkdir()
    pages = [docs / "explanation" / "evidence.md", *(docs / "algorithms").glob("*.md")]
    for page in pages:
        (tmp_path / page.relative_to(docs)).write_text(page.read_text())
    evidence.pages.write(found, tmp_path)
    for page in pages:
        again = (tmp_path / page.relative_to(docs)).read_text()
        assert again == page.read_text(), f"{page.name} is old: type nox -s evidence -- --tables"
    for card in evidence.pages.cards(docs / "algorithms"):
        assert (
            card.read_text().count(evidence.pages.HEAD) == 1 and "not measured here yet" not in card.read_text().lower()
        )
    declared = {name for name in evidence.rows.read(evidence.rows.FILE) if not name.startswith("x-")}
    assert declared <= found["rows"].keys() | evidence.pages.reasons_without(found).keys()


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested data, numbers up to rounding: versions of scipy differ in the last digit of a p-value."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal(first, second)
    else:
        assert one == (pytest.approx(other, rel=1e-9) if isinstance(one, float) else other)


def test_tables_of_n_grams_are_those_of_counting_by_hand(evidence: Any) -> None:
    import torch

    random = torch.Generator().manual_seed(0)
    windows = {part: torch.randint(5, (20, 7), generator=random) for part in ("train", "validation", "test")}
    parts = {part: [(row[:-1], row[1:]) for row in rows] for part, rows in windows.items()}
    train = [tuple(row) for row in windows["train"].tolist()]

    def of(before: tuple[int, ...], char: int, pseudo: tuple[float, ...]) -> float:
        """The probability by the table of as many characters as pseudo-counts; ``before`` is one shorter."""
        if not pseudo:
            return 1 / 5
        length = len(before) + 1
        grams = [row[at + 1 - length : at + 1] for row in train for at in range(max(1, length - 1), len(row))]
        seen = [gram[-1] for gram in grams if gram[:-1] == before]
        return (seen.count(char) + pseudo[-1] * of(before[1:], char, pseudo[:-1])) / (len(seen) + pseudo[-1])

    def perplexity(part: str, pseudo: tuple[float, ...]) -> float:
        logs = []
        for row in map(tuple, windows[part].tolist()):
            for at in range(1, len(row)):
                length = min(len(pseudo), at + 1)
                logs.append(math.log(of(row[at + 1 - length : at], row[at], pseudo[:length])))
        return math.exp(-sum(logs) / len(logs))

    found = evidence.ngrams.references(parts)
    pseudo: tuple[float, ...] = ()
    for name in evidence.ngrams.NAMES.values():
        several = [(*pseudo, each) for each in evidence.ngrams.PSEUDO_COUNTS]
        pseudo = min(several, key=lambda given: perplexity("validation", given))
        assert found[name] == pytest.approx(perplexity("test", pseudo))


def test_the_shortest_schedule_within_a_standard_error_of_the_best_is_chosen(evidence: Any) -> None:
    points = [
        {"lr": 1, "duration": "10ep", "quality": [80.0, 81.0, 82.0]},
        {"lr": 1, "duration": "20ep", "quality": [89.0, 90.0, 91.0]},
        {"lr": 2, "duration": "20ep", "quality": [89.5, 90.5, 91.5]},
        {"lr": 1, "duration": "40ep", "quality": [90.0, 91.0, 92.0]},
    ]
    tasks = evidence.tasks.TASKS
    assert evidence.tune.choose(tasks["digits"], points) == {"lr": 2, "duration": "20ep"}
    assert evidence.tune.choose(tasks["stdlib-chars"], points) == {"lr": 1, "duration": "10ep"}


def test_what_the_settings_no_longer_are_is_tuned_again_and_a_rate_that_diverges_does_not_win(
    evidence: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, tune = evidence.tasks.TASKS["digits"], evidence.tune
    row = evidence.rows.Row("sgd", ("digits",), {"optimizer": "sgd"}, grid={"lr": [0.1, 1.0, 10.0]})
    set_baseline(evidence, "4ba")
    answers = {0.1: 90.0, 0.5: 92.0, 1.0: 91.0, 10.0: math.nan}

    def run(task: Any, arguments: Any, *_: Any) -> dict[str, Any]:
        ran.append(rate := arguments["optimizer"]["sgd"]["lr"])
        return {"quality": answers[rate]}

    def side_by_side(jobs: Any, workers: int) -> Any:
        return ((key, job()) for key, job in jobs)

    ran: list[float] = []
    monkeypatch.setattr(tune, "run", run)
    monkeypatch.setattr(tune, "side_by_side", side_by_side)
    tune.tune([task], [row], 1)
    assert tune.chosen(tune.read(), "digits")["sgd"] == {"lr": 1.0} and len(ran) == 9
    assert "edge" not in capsys.readouterr().out
    tune.tune([task], [row], 1)
    assert len(ran) == 9  # nothing is tuned twice
    tune.tune([task], [evidence.rows.Row("sgd", ("digits",), {"optimizer": "sgd"}, grid={"lr": [0.1, 1.0]})], 1)
    assert len(ran) == 9 and "sgd on digits: the chosen lr 1.0 is at the edge" in capsys.readouterr().out
    tune.tune([task], [evidence.rows.Row("sgd", ("digits",), {"optimizer": "sgd"}, grid={"lr": [0.1, 0.5, 1.0]})], 1)
    assert ran[9:] == [0.5] * 3 and tune.chosen(tune.read(), "digits")["sgd"] == {"lr": 0.5}  # only the new point ran
    set_baseline(evidence, "4ba", sgd=tune.read()["digits"]["sgd"] | {"settings": {"arguments": {}, "grid": {}}})
    tune.tune([task], [row], 1)
    assert len(ran) == 21  # with other arguments all points run


def test_settings_of_a_row_replace_the_baselines(evidence: Any) -> None:
    rows, task = evidence.rows, evidence.tasks.TASKS["digits"]
    tuned = {"plain": {"lr": 1e-3, "duration": "20ep"}, "other": {"lr": 0.5}}
    plain = rows.trainer_arguments(task, rows.Row("plain"), tuned)
    assert plain["optimizer"] == {"adamw": {"lr": 1e-3, "weight_decay": 0.01}} and plain["duration"] == "20ep"
    other = rows.trainer_arguments(task, rows.Row("other", arguments={"optimizer": {"sgd": {"momentum": 0.9}}}), tuned)
    assert other["optimizer"] == {"sgd": {"lr": 0.5, "momentum": 0.9}}
    fixed = rows.Row("recipe", arguments={"optimizer": "sgd(lr=0.1)", "duration": "2ep", "batch_size": 8})
    assert rows.trainer_arguments(task, fixed, tuned) == {**plain, **fixed.arguments}


@pytest.mark.long
def test_every_row_and_recipe_can_be_planned(evidence: Any, tmp_path: Path) -> None:
    """Where its plug-ins are installed, on a task whose data is."""
    rows, tasks = evidence.rows, evidence.tasks.TASKS
    planned = set()
    for row in [*rows.rows().values(), *rows.recipes()]:
        if row.skip or row.missing or row.model.keys() & {"library", "norm"}:
            continue
        task = tasks["stdlib-chars" if row.model or not {"digits", "mnist5k"} & set(row.tasks) else "digits"]
        tuned = {"plain": {"lr": 1e-3, "duration": "1ep"}, row.name: {"lr": 1e-2} if row.grid else {}}
        arguments = rows.trainer_arguments(task, row, tuned)
        with evidence.measure.make_trainer(task, arguments, 0, "test", row.model, str(tmp_path)) as trainer:
            planned.update(attachment.name for attachment in trainer.plan().attachments)
    assert planned >= {"ema", "label-smoothing", "blurpool"}


@pytest.mark.long
def test_a_toy_run_is_measured_resumed_checked_and_published(evidence: Any, monkeypatch, tmp_path, capsys) -> None:
    for folder in ("algorithms", "explanation"):
        (tmp_path / folder).mkdir()
    (tmp_path / "algorithms" / "label-smoothing.md").write_text(
        "# Label smoothing\n\nText.\n\n## Sources\n\n- A paper.\n"
    )
    (tmp_path / "algorithms" / "colout.md").write_text("# ColOut\n")
    (tmp_path / "explanation" / "evidence.md").write_text(f"# Evidence\n\n{evidence.pages.MARK}\nold\n")
    set_baseline(evidence, "4ba")
    monkeypatch.setattr(evidence.rows, "SPEEDRUN", tmp_path / "speedrun")
    (tmp_path / "speedrun" / "digits").mkdir(parents=True)
    (tmp_path / "speedrun" / "digits" / "half.yaml").write_text("duration: 2ba\noptimizer: adamw(lr=1e-2)\n")
    monkeypatch.setattr("evidence.__main__.recipes", partial(evidence.rows.recipes, tmp_path / "speedrun"))

    words = ["--only", "digits", "label-smoothing", "digits/half", "--seeds", "1-2"]
    assert evidence.main([*words, "--publish"]) == 0
    assert "6/6 digits" in capsys.readouterr().out
    found = json.loads((tmp_path / "evidence" / "results.json").read_text())
    assert found["tasks"]["digits"]["runs"] == 2 and found["tasks"]["digits"]["identical"]
    assert found["recipes"]["digits/half"]["cells"]["digits"]["seeds"] == [1, 2, 3, 4]
    cell = found["rows"]["label-smoothing"]["cells"]["digits"]
    assert cell["seeds"] == [1, 2] and cell["peak_mib"][0] > 0
    assert found["recipes"]["digits/half"]["cells"]["digits"]["time"]["mean"] < 1

    card = (tmp_path / "algorithms" / "label-smoothing.md").read_text()
    assert card.index("Text.") < card.index("<!-- evidence -->") < card.index("## Sources") and "A paper." in card
    index = (tmp_path / "algorithms" / "index.md").read_text()
    assert "[label-smoothing](label-smoothing.md)" in index and "- [colout](colout.md): it was added after" in index
    assert (
        card.splitlines()[2:5:2] == [evidence.pages.HEAD, evidence.pages.HEAD_END] and "**Measured here:** ❗" in card
    )
    assert found["tasks"]["stdlib-chars"]["references"]["bigram"] == pytest.approx(11.4, abs=0.5)
    assert (
        "[digits/half](../../benchmarks/speedrun/digits/half.yaml)"
        in (tmp_path / "explanation" / "evidence.md").read_text()
    )

    pages = {file: file.read_text() for file in tmp_path.rglob("*.md")}
    assert evidence.main([*words, "--publish"]) == 0  # measures nothing more, and writes the same
    assert "digits label-smoothing" not in capsys.readouterr().out
    assert pages == {file: file.read_text() for file in tmp_path.rglob("*.md")}

    assert evidence.main(["--only", "digits", "--check", "label-smoothing", "--seeds", "1-2"]) == 0
    assert "label-smoothing on digits" in capsys.readouterr().out
    found["rows"]["label-smoothing"]["cells"]["digits"]["gain"].update(mean=50.0, low=49.0, high=51.0, deviation=0.1)
    (tmp_path / "evidence" / "results.json").write_text(json.dumps(found))
    assert evidence.main(["--only", "digits", "--check", "label-smoothing", "--seeds", "1-2"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_a_run_that_fails_is_recorded_and_published_as_failing(evidence: Any, tmp_path: Path) -> None:
    task = evidence.tasks.TASKS["digits"]
    evidence.measure.prepare([task])
    row = evidence.rows.Row(
        "broken", ("digits",), {"algorithms": [{"gradient-clipping": {"kind": "norm", "threshold": -1.0}}]}
    )
    set_baseline(evidence, "1ba")
    evidence.run.measure([(task, row)], range(1, 2), 1)
    (record,) = evidence.run.read()
    assert record["versions"]["torch"] == metadata.version("torch") and "cpu" in record["machine"]
    assert "quality" in record["plain"] and "threshold" in evidence.run.failures(record)
    cells = evidence.publish.results([row], range(1, 2))["rows"]["broken"]["cells"]
    assert "threshold" in cells["digits"]["error"]
    evidence.run.measure([(task, row)], range(1, 2), 1)
    assert len(evidence.run.read()) == 2  # once more, in case that it was the machine
    evidence.run.FILE.write_text(json.dumps(record | {"versions": {"torch": "1.0"}}) + "\n")
    assert evidence.run.read() == []  # of another version


def test_a_row_with_fewer_seeds_is_left_out(evidence: Any, capsys: pytest.CaptureFixture[str]) -> None:
    task, row = evidence.tasks.TASKS["digits"], evidence.rows.Row("a", ("digits",))
    set_baseline(evidence, "1ba")
    origin = {"task": "digits", "name": "a", "settings": evidence.run.settings_of(task, row), "commit": "c"}
    records = [pair(seed, 90.0, 91.0 + seed) | origin | evidence.run.made_with() for seed in (1, 2)]
    evidence.run.FILE.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evidence.publish.results([row], range(1, 4))["rows"] == {}
    assert "a on digits: this row is omitted, because only 2 of 3 seeds" in capsys.readouterr().out
    found = evidence.publish.results([row], range(1, 3))
    assert found["rows"]["a"]["cells"]["digits"]["gain"]["mean"] == 2.5 and found["commits"] == ["c"]


def test_a_block_replaces_an_earlier_one(evidence: Any) -> None:
    with_block = evidence.pages.with_block
    card = "# A\n\nText.\n\n## Source and cost\n\nB.\n"
    once = with_block(card, "new")
    assert once == "# A\n\nText.\n\n<!-- evidence -->\nnew\n<!-- /evidence -->\n\n## Source and cost\n\nB.\n"
    assert with_block(with_block(card, "old"), "new") == once
    assert with_block("# A\n", "new") == "# A\n\n<!-- evidence -->\nnew\n<!-- /evidence -->\n"
    assert with_block(with_block("# A\n", "old"), "new") == with_block("# A\n", "new")
