"""Every algorithm with microbatches, bf16, compile, ranks and after a kill; and every two of them together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matrix import columns, page, runs

import hocket
from hocket import plugins

pytestmark = [
    pytest.mark.filterwarnings("ignore:The loss spiked"),
    pytest.mark.filterwarnings("ignore::hocket.NoEffectWarning"),  # in sets, and on models without memory
]
SETS = runs.covering(runs.NAMES, 8)
GROUPS = [runs.NAMES[start::3] for start in range(3)]


def test_the_packages_are_there() -> None:
    """Otherwise the tests below would be about nothing."""
    assert len(runs.NAMES) >= 8 and {"ema", "sam", "blurpool", "augmix", "alibi"} <= set(runs.NAMES)


# --- each alone


@pytest.mark.parametrize("name", runs.NAMES)
def test_each_changes_the_run(name: str) -> None:
    """So that the tests below do not compare runs in which nothing happened."""
    check(name, "weights", [] if runs.different(runs.alone(name), runs.plain(name)) else ["nothing"])


@pytest.mark.parametrize(
    "column",
    # Microbatches are in the suite of every algorithm too.
    [pytest.param(each, marks=() if each == "bf16" else pytest.mark.long) for each in columns.COLUMNS],
)
@pytest.mark.parametrize("name", runs.NAMES)
def test_a_cell_holds_or_has_a_reason(name: str, column: str, tmp_path: Path) -> None:
    check(name, column, columns.COLUMNS[column](name, tmp_path))


@pytest.mark.parametrize(
    "names",
    [pytest.param(each, marks=pytest.mark.long if number else ()) for number, each in enumerate(GROUPS)],
    ids="+".join,
)
@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=pytest.mark.long if each == "fsdp" else ()) for each in columns.STRATEGIES]
)
def test_a_cell_of_ranks_holds_or_has_a_reason(strategy: str, names: list[str]) -> None:
    wrong = []
    for name, found in zip(names, columns.on_two_ranks(strategy, [(name,) for name in names]), strict=True):
        apart = [found] if isinstance(found, str) else runs.different(found, runs.alone(name), columns.rounding(name))
        wrong.append(problem(name, strategy, apart))
        if refused(name, strategy) is not isinstance(found, str):
            wrong.append(f"'{name}' with {strategy} is refused: {isinstance(found, str)}. Say so in reasons.toml.")
    assert not any(wrong), "\n".join(filter(None, wrong))


def check(name: str, column: str, found: list[str]) -> None:
    wrong = problem(name, column, found)
    assert not wrong, wrong


def problem(name: str, column: str, found: list[str]) -> str:
    """What is wrong with a cell, given what differs."""
    reason = page.REASONS.get(name, {}).get(column)
    if found and not reason:
        return f"'{name}' with {column} differs: {found[:3]}. Mend it, or say why in reasons.toml."
    return f"'{name}' with {column} holds. Remove the reason: {reason}." if reason and not found else ""


def test_the_page_shows_the_matrix() -> None:
    assert page.PAGE.read_text() == page.text(runs.NAMES), "python tests/matrix/page.py"
    assert page.REASONS.keys() <= set(runs.NAMES)


# --- together: every two that do not conflict are in one of these sets


def test_the_sets_cover_every_pair() -> None:
    together = {frozenset((a, b)) for each in SETS for a in each for b in each if a != b}
    for a in runs.NAMES:
        for b in runs.NAMES:
            assert a == b or (frozenset((a, b)) in together) is not runs.conflict(a, b)


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_they_plan_and_train_together(names: tuple[str, ...]) -> None:
    """The plan names each, events call them in the order of their phases, and the model is trained."""
    trainer = runs.make(*names, memory=True)
    plan = trainer.plan()
    assert [each.name for each in plan.attachments if each.kind == "algorithms"] == list(names)
    check_order(trainer)
    before = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    result = trainer.fit()
    assert torch.isfinite(torch.tensor(result.metrics["eval/loss"]))
    after = trainer.model_state_dict(evaluated=False)
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], after[name]) for name, _ in trainer.state.model.named_parameters())


def check_order(trainer: hocket.Trainer) -> None:
    """Phases and constraints hold on every event; on ``after_x``, the reverse for those that also act on ``before_x``."""
    events = trainer.plan().events
    for event, names in events.items():
        classes = {name: plugins.get("algorithms", name) for name in names if name in runs.NAMES}
        closing = event.startswith("after_") and set(events.get(f"before_{event.removeprefix('after_')}", ()))
        for place, (name, cls) in enumerate(classes.items()):
            for other, later in list(classes.items())[place + 1 :]:
                reverse = bool(closing) and name in closing and other in closing
                if closing and (name in closing) is not (other in closing):
                    assert name not in closing, f"{event}: '{name}' before '{other}', and it closes what it began"
                    continue
                first, then = ((other, later), (name, cls)) if reverse else ((name, cls), (other, later))
                assert first[0] not in then[1].before and then[0] not in first[1].after, f"{event}: {names}"
                declared = then[0] in first[1].before or first[0] in then[1].after
                assert declared or first[1].phase <= then[1].phase, f"{event}: {names}"


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_the_order_of_the_user_matters_only_within_a_phase(names: tuple[str, ...]) -> None:
    """The phases decide, and the random numbers of one do not depend on the others."""
    phases = {name: plugins.get("algorithms", name).phase for name in names}
    within = sorted(names, key=lambda name: -phases[name])  # phases in reverse; within each as given
    assert not runs.different(runs.together(names), runs.trained(*within, memory=True))


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_a_fit_in_increments_is_one_fit(names: tuple[str, ...]) -> None:
    """What algorithms keep between batches survives the end of a fit within an epoch."""
    parts = runs.trained(*names, memory=True, increments=("2ba", "4ba"))
    assert not runs.different(parts, runs.together(names))


@pytest.mark.long
@pytest.mark.parametrize("strategy", columns.STRATEGIES)
def test_two_ranks_hold_the_same_weights(strategy: str) -> None:
    """In sets of their own, because one algorithm that a strategy refuses would hide all its pairs."""
    sets = runs.covering([name for name in runs.NAMES if not refused(name, strategy)], 8)
    for names, found in zip(sets, columns.on_two_ranks(strategy, sets), strict=True):
        assert not isinstance(found, str), f"{names} on {strategy}: {found}"


def refused(name: str, column: str) -> bool:
    """Whether an algorithm alone is refused; a test above checks that it is."""
    return page.REASONS.get(name, {}).get(column, "").startswith("refused")
