"""Measure pairs of runs that are not in the file of results yet, and append them.

A record holds the machine, the versions and the commit it was measured with. One of another machine or version is ignored.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import metadata
from itertools import count
from operator import itemgetter
from pathlib import Path
from shutil import which
from typing import Any

from harness import machine

from evidence import tune
from evidence.measure import in_turns, run, side_by_side
from evidence.rows import PLAIN, Row, trainer_arguments
from evidence.tasks import TASKS, Task

#: Rows beside one plain run.
BLOCK = 4
FILE = Path(__file__).parents[1] / "results" / "evidence.jsonl"
_VERSIONS = ("hocket", "torch", "numpy", "scikit-learn", "mlxtend", "transformers", "schedulefree", "pytorch-optimizer")


def measure(cells: Iterable[tuple[Task, Row]], seeds: range, workers: int) -> None:
    """Measure each row on its task, by seed first, so that an interrupted run has some seeds of every row.

    Up to `BLOCK` rows with the same plain settings share a plain run beside them.
    """
    records, due = read(), defaultdict(list)
    wanted = [(seed, task, row) for task, row in cells for seed in row.seeds(seeds)]
    for seed, task, row in sorted(wanted, key=itemgetter(0)):
        settings = settings_of(task, row)
        if not any(_is(record, task, row, settings, seed) and not failures(record) for record in records):
            due[task.name, seed, json.dumps([settings["plain"], row.model])].append((row, settings))
    blocks = {
        (task, seed, plain, start): block[start : start + BLOCK]
        for (task, seed, plain), block in due.items()
        for start in range(0, len(block), BLOCK)
    }
    jobs = {key: partial(_block, TASKS[key[0]], block, key[1]) for key, block in blocks.items()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    numbers, total = count(1), sum(map(len, blocks.values()))
    origin = {**made_with(), "commit": commit()}
    for key, runs in side_by_side(jobs.items(), workers):
        task, seed = key[:2]
        for row, settings in blocks[key]:
            pair = {name: runs.get(run, runs) for name, run in (("plain", PLAIN), ("row", row.name))}
            record = {"task": task, "name": row.name, "seed": seed, "settings": settings, **origin, **pair}
            with FILE.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            told = failures(record) or f"{pair['row']['quality']:.2f}, plain {pair['plain']['quality']:.2f}"
            print(f"{next(numbers)}/{total}", task, row.name, seed, told, flush=True)


@cache
def made_with() -> dict[str, Any]:
    """Machine and versions."""
    installed = {each.name for each in metadata.distributions()}
    return {"machine": machine(), "versions": {name: metadata.version(name) for name in _VERSIONS if name in installed}}


def commit() -> str:
    """The commit of the working tree, with ``+`` if files differ from it; nothing outside a repository."""
    words = ["git", "-C", str(FILE.parents[1]), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() if which("git") else ""


def settings_of(task: Task, row: Row) -> dict[str, Any]:
    """What determines the runs of a pair."""
    tuned = tune.chosen(tune.read(), task.name)
    plain = trainer_arguments(task, Row(PLAIN, both=row.both), tuned)
    settings = {"plain": plain, "row": trainer_arguments(task, row, tuned), "model": row.model}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]  # as in the file


def _block(task: Task, rows: Sequence[tuple[Row, dict[str, Any]]], seed: int) -> dict[str, Any]:
    model, plain = rows[0][0].model, rows[0][1]["plain"]
    runs = {PLAIN: partial(run, task, plain, seed, "test", model)}
    runs |= {row.name: partial(run, task, own["row"], seed, "test", model) for row, own in rows}
    return in_turns(runs, backwards=seed % 2 == 0)


def read() -> list[dict[str, Any]]:
    """All records of this machine and of these versions."""
    records = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    return [record for record in records if {key: record.get(key) for key in made_with()} == made_with()]


def pairs_of(records: Sequence[dict[str, Any]], task: Task, row: Row, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The latest record of each seed that was measured with the settings of today."""
    settings = settings_of(task, row)
    found = ([record for record in records if _is(record, task, row, settings, seed)][-1:] for seed in seeds)
    return [record for latest in found for record in latest]


def failures(record: dict[str, Any]) -> str:
    """Why a pair has no result, or nothing."""
    return "; ".join(f"{name}: {record[name]['error']}" for name in ("plain", "row") if "error" in record.get(name, {}))


def _is(record: dict[str, Any], task: Task, row: Row, settings: dict[str, Any], seed: int) -> bool:
    return (record["task"], record["name"], record["seed"], record["settings"]) == (task.name, row.name, seed, settings)
