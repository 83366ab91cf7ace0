"""Choose learning rates, and the length of the baseline's schedule, on validation data; tuned.json records all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
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
    """Tune each baseline, then each row that has a grid, where tuned.json has no record for this grid."""
    baseline = [(task, Row(PLAIN, grid=task.grid)) for task in tasks]
    for pairs in (baseline, [(task, row) for row in rows if row.grid for task in tasks if task.name in row.tasks]):
        records = read()
        due = [
            (task, row)
            for task, row in pairs
            if records.get(task.name, {}).get(row.name, {}).get("grid") != {**row.grid} and not row.missing
        ]
        jobs = {
            (task.name, row.name, number, seed): partial(_one, task, row, point, records, seed)
            for task, row in due
            for number, point in enumerate(row.grid_points)
            for seed in SEEDS
        }
        answers: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        for key, answer in side_by_side(jobs.items(), workers):
            answers[key] = answer
            print("tuning", *key, f"{answer['quality']:.3f}" if "quality" in answer else answer, flush=True)
            for task, row in due:
                own = [(task.name, row.name, number, seed) for number in range(len(row.grid_points)) for seed in SEEDS]
                if key in own and set(own) <= set(answers):
                    _record(task, row, [answers[each] for each in own])


def _record(task: Task, row: Row, answers: Sequence[Mapping[str, Any]]) -> None:
    """Choose among the points, whose answers come by point and then by seed, and write it down."""
    points = []
    for number, point in enumerate(row.grid_points):
        found = answers[number * len(SEEDS) :][: len(SEEDS)]
        # A run that failed, such as one whose loss became infinite, rules its point out.
        if all("quality" in answer for answer in found):
            points.append({**point, "quality": [round(answer["quality"], 4) for answer in found]})
    if not points:
        raise RuntimeError(f"{row.name} fails on {task.name} with every value of its grid {dict(row.grid)}.")
    record = {"grid": {**row.grid}, "seeds": SEEDS, "chosen": choose(task, points), "points": points}
    records = read()
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
