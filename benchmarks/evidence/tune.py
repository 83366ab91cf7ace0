"""Choose learning rates, and the length of the baseline's schedule, on validation data; tuned.json records all of it.

What was tuned is tuned again when the settings change: those of the row, or what the baseline was tuned to. Of a grid that
was extended only the new points run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from evidence.measure import run, side_by_side
from evidence.rows import PLAIN, Row, trainer_arguments
from evidence.tasks import Task
from hocket import Time

FILE = Path(__file__).parent / "tuned.json"
SEEDS = (1001, 1002, 1003)


def read() -> dict[str, dict[str, Any]]:
    """What was tuned so far, by task and row."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def chosen(records: Mapping[str, Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """The chosen values of a task, by row."""
    return {row: record["chosen"] for row, record in records.get(task, {}).items()}


def tune(tasks: Sequence[Task], rows: Sequence[Row], workers: int) -> None:
    """Tune each baseline, then each row that has a grid, where tuned.json has no record with these settings."""
    baseline = [(task, Row(PLAIN, grid=task.grid)) for task in tasks]
    for pairs in (baseline, [(task, row) for row in rows if row.grid for task in tasks if task.name in row.tasks]):
        records = read()
        due = [
            (task, row)
            for task, row in pairs
            if records.get(task.name, {}).get(row.name, {}).get("settings") != settings_of(task, row, records)
        ]
        jobs = {
            (task.name, row.name, number, seed): partial(_one, task, row, point, records, seed)
            for task, row in due
            for number, point in enumerate(row.grid_points)
            for seed in SEEDS
        }
        answers: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        known = {
            key: {"quality": quality}
            for task, row in due
            for number, qualities in _known(task, row, records).items()
            for seed, quality in zip(SEEDS, qualities, strict=True)
            if (key := (task.name, row.name, number, seed)) in jobs
        }
        new = side_by_side([(key, job) for key, job in jobs.items() if key not in known], workers)
        for key, answer in chain(known.items(), new):
            answers[key] = answer
            if key not in known:
                print("tuning", *key, f"{answer['quality']:.3f}" if "quality" in answer else answer, flush=True)
            for task, row in due:
                own = [(task.name, row.name, number, seed) for number in range(len(row.grid_points)) for seed in SEEDS]
                if key in own and set(own) <= set(answers):
                    _record(task, row, [answers[each] for each in own])


def settings_of(task: Task, row: Row, records: Mapping[str, Any]) -> dict[str, Any]:
    """What determines a record, as it is in the file."""
    tuned = {PLAIN: chosen(records, task.name).get(PLAIN, {})} if row.name != PLAIN else {}
    arguments = trainer_arguments(task, row, tuned)
    return json.loads(json.dumps({"arguments": arguments, "grid": row.grid}))  # type: ignore[no-any-return]


def _known(task: Task, row: Row, records: Mapping[str, Any]) -> dict[int, list[float]]:
    """The qualities of points that were tuned with the same arguments, by the point's number in the grid."""
    record = records.get(task.name, {}).get(row.name, {})
    before = record.get("settings", {}).get("arguments")
    if before != settings_of(task, row, records)["arguments"]:
        return {}
    found = {
        number: [p["quality"] for p in record["points"] if p == {**point, "quality": p["quality"]}]
        for number, point in enumerate(row.grid_points)
    }
    return {number: qualities[0] for number, qualities in found.items() if qualities}


def at_edge(record: Mapping[str, Any] | None) -> bool:
    """Whether the chosen learning rate is the smallest or the largest of several: a better one may lie beyond."""
    rates = record["settings"]["grid"].get("lr", []) if record else []
    return bool(record and len(rates) > 1 and record["chosen"]["lr"] in (min(rates), max(rates)))


def _record(task: Task, row: Row, answers: Sequence[Mapping[str, Any]]) -> None:
    """Choose among the points, whose answers come by point and then by seed, and write it down."""
    points = []
    for number, point in enumerate(row.grid_points):
        found = answers[number * len(SEEDS) :][: len(SEEDS)]
        # A run that failed, such as one whose loss became infinite, rules its point out.
        if all(math.isfinite(answer.get("quality", math.nan)) for answer in found):
            points.append({**point, "quality": [round(answer["quality"], 4) for answer in found]})
    if not points:
        told = next((answer["error"] for answer in answers if "error" in answer), "no finite quality")
        raise RuntimeError(f"{row.name} fails on {task.name} with every value of its grid {dict(row.grid)}: {told}.")
    records = read()
    record = {
        "settings": settings_of(task, row, records), "seeds": SEEDS, "chosen": choose(task, points), "points": points,
    }  # fmt: skip
    if at_edge(record):
        print(f"{row.name} on {task.name}: the chosen lr {record['chosen']['lr']} is at the edge of its grid.")
    records.setdefault(task.name, {})[row.name] = record
    FILE.write_text(json.dumps(records, indent=1) + "\n")


def _one(task: Task, row: Row, point: Mapping[str, Any], records: Mapping[str, Any], seed: int) -> dict[str, Any]:
    values = {**chosen(records, task.name), row.name: point}
    return run(task, trainer_arguments(task, row, values), seed, "validation", row.model)


def choose(task: Task, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the points within one standard error of the best mean, the best of those with the shortest schedule."""
    sign = 1 if task.higher_is_better else -1
    best = max(points, key=lambda point: sign * fmean(point["quality"]))
    near = sign * fmean(best["quality"]) - stdev(best["quality"]) / len(best["quality"]) ** 0.5
    good = [point for point in points if sign * fmean(point["quality"]) >= near]
    shortest = min((point.get("duration", "0ba") for point in good), key=lambda text: Time.parse(text).value)
    among = [point for point in good if point.get("duration", "0ba") == shortest]
    winner = max(among, key=lambda point: sign * fmean(point["quality"]))
    return {key: value for key, value in winner.items() if key != "quality"}
