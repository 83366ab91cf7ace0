"""Runs that are killed at random moments, in saves and between them, end as if nothing had happened, to the last bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from moments import Moment, Watch
from training_script import differences, make, outcome

from hocket_testkit import RankError, run_ranks

BATCHES = 40  # more than are trained in all the runs that are killed


def train(folder: Path, ranks: int, moment: Moment | None = None, **policy: Any) -> list[Watch]:
    """Train, by forks, until the end or the moment; what they counted, by rank. Raises RankError if one was killed."""
    watches = [Watch() for _ in range(ranks)]

    def rank_main(rank: int) -> None:
        watches[rank].start(moment if moment is not None and moment.rank == rank else None)
        trainer = make(folder, duration=f"{BATCHES}ba", policy=policy)
        watches[rank].set_up.value = watches[rank].calls[False].value
        trainer.fit()
        assert trainer.state.timestamp.batch == BATCHES

    try:
        run_ranks(rank_main, ranks)
    except RankError as error:
        assert moment is not None and error.rank == moment.rank and "was killed by SIGKILL" in str(error), error
    return watches


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks: what comes out, and roughly how many calls setting up, a batch and a save take."""
    make(tmp_path_factory.mktemp("imports") / "checkpoints")
    known: dict[int, Any] = {}

    def of(ranks: int) -> Any:
        if ranks not in known:
            folder = tmp_path_factory.mktemp("whole")
            watch = train(folder, ranks)[0]
            outside, inside = (each.value for each in watch.calls)
            assert watch.saves.value == BATCHES + 1  # and the end, evaluated after its last batch
            known[ranks] = (
                outcome(folder),
                watch.set_up.value,
                (outside - watch.set_up.value) // BATCHES,
                inside // BATCHES,
            )
        return known[ranks]

    return of


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "asynchronous", "kills"),
    [(1, False, 20), (2, False, 20), (1, True, 6), (2, True, 4)],
)
def test_killed_at_random_moments(
    tmp_path: Path, uninterrupted: Any, ranks: int, asynchronous: bool, kills: int
) -> None:
    """Half of the moments are in saves. The others are anywhere from the start of the process to the third batch after it."""
    expected, set_up, batch, save = uninterrupted(ranks)
    seed = int(os.environ.get("HOCKET_FAULTS_SEED", random.randrange(10**6)))
    print(f"HOCKET_FAULTS_SEED={seed} repeats these moments.")
    draw = random.Random(seed)
    places = [True, False] * (kills // 2)
    draw.shuffle(places)
    landed, unfinished = [], 0
    for inside in places:
        calls = draw.randrange(save * 3 // 2 if inside else set_up + 2 * batch)
        moment = Moment(inside, calls, 0 if inside else draw.randrange(ranks))
        watches = train(tmp_path, ranks, moment, asynchronous=asynchronous)
        assert watches[moment.rank].calls[inside].value == calls, f"{moment} was not reached"
        landed.append(bool(watches[0].saving.value))
        assert landed[-1] or not inside
        unfinished += any(entry.name.endswith(".partial") for entry in tmp_path.iterdir())
    # A thread writes most of the time; and of few kills in saves all may come before there is a file.
    assert asynchronous or kills < 20 or (unfinished > 0 and landed.count(False) > 0)
    train(tmp_path, ranks, asynchronous=asynchronous)
    assert differences(outcome(tmp_path), expected) == []
