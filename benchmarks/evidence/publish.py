"""Merge the results measured here into the published JSON, from which `pages` makes the tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence import ngrams, pages, pairs, run, tune
from evidence.rows import Row, shown
from evidence.tasks import TASKS

DOCS = Path(__file__).parents[2] / "docs"


def results(chosen: Sequence[Row], seeds: range) -> dict[str, Any]:
    """Everything that the tables say, from the file of measured pairs."""
    records, tuned = run.read(), tune.read()
    entries: dict[str, dict[str, Any]] = {"rows": {}, "recipes": {}}
    for row in chosen:
        cells = {name: cell for name in row.tasks if (cell := _cell(records, row, name, row.seeds(seeds)))}
        if cells:
            common = {key: value for key, value in (("both", row.both), ("model", row.model)) if value}
            settings = {**row.arguments, **common}
            edge = [name for name in cells if tune.at_edge(tuned.get(name, {}).get(row.name))]
            entry = {"settings": shown(settings), "at_edge": edge, "cells": cells}
            entries["recipes" if row.recipe else "rows"][row.name] = entry
    found = {
        **run.made_with(),
        "commits": sorted({record["commit"] for record in records}),
        "seeds": list(seeds),
        "tasks": {name: _task(name, tuned, records, seeds) for name in TASKS},
        **entries,
    }
    return judged(found)


def published() -> dict[str, Any]:
    """The results that the pages show; empty before the first publication."""
    file = DOCS / "evidence" / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}  # type: ignore[no-any-return]


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the verdicts that follow from their measurements; rows and recipes are two sets of comparisons."""
    found = copy.deepcopy(dict(found))
    margins = {name: task["margin"] for name, task in found["tasks"].items()}
    for kind in ("rows", "recipes"):
        pairs.judge(found[kind], margins)
    return found


def merged(
    before: Mapping[str, Any], new: Mapping[str, Any], known: Mapping[str, Row], untimed: bool = False
) -> dict[str, Any]:
    """What is published with cells that were measured again in place of theirs, and new ones beside them.

    A cell from another run than the tables says so, under ``measured``. If ``new`` has all cells it is the new publication. A
    cell that `rows.yaml` no longer asks for is dropped.

    Args:
        before: what is published.
        new: results of today, of any rows.
        known: rows and recipes of today, by name.
        untimed: whether other programs ran beside those of ``new``, so that their times say nothing.
    """
    old = {
        (kind, name, task): (entry, cell)
        for kind in ("rows", "recipes")
        for name, entry in before.get(kind, {}).items()
        for task, cell in entry["cells"].items()
        if name not in known or task in known[name].tasks
    }
    today = {
        (kind, name, task): (entry, cell)
        for kind in ("rows", "recipes")
        for name, entry in new[kind].items()
        for task, cell in entry["cells"].items()
    }
    if not before or old.keys() <= today.keys():
        return dict(new)
    origin = {key: new[key] for key in ("machine", "versions", "commits")}
    found: dict[str, Any] = {**copy.deepcopy(dict(before)), "rows": {}, "recipes": {}}
    for key, (entry, cell) in {**old, **today}.items():
        kind, name, task = key
        where = found[kind].setdefault(name, {**entry, "cells": {}})
        again = {**cell, "measured": origin, **({"untimed": True} if untimed else {})}
        where["cells"][task] = again if key in today else cell
        if key in today:  # settings of rows that are measured again may have changed
            where.update(settings=entry["settings"], at_edge=entry["at_edge"])
    return judged(found)


def with_references(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results with what tables of n-grams reach on the text task."""
    tasks = {name: dict(task) for name, task in found["tasks"].items()}
    tasks["stdlib-chars"]["references"] = ngrams.references(TASKS["stdlib-chars"].parts())
    return {**found, "tasks": tasks}


def _cell(records: Sequence[dict[str, Any]], row: Row, task: str, seeds: Sequence[int]) -> dict[str, Any] | None:
    found = run.pairs_of(records, TASKS[task], row, seeds)
    if failed := [text for record in found if (text := run.failures(record))]:
        return {"error": failed[0]}
    if 0 < len(found) < len(seeds):
        print(
            f"{row.name} on {task}: this row is omitted, because only {len(found)} of {len(seeds)} seeds were measured."
        )
    if len(found) < max(2, len(seeds)):
        return None
    return pairs.summary(found, TASKS[task].higher_is_better)


def _task(
    name: str, tuned: Mapping[str, Any], records: Sequence[dict[str, Any]], seeds: Sequence[int]
) -> dict[str, Any]:
    """The task's baseline, over all plain runs that were made beside rows."""
    task, record = TASKS[name], tuned.get(name, {}).get("plain")
    plain = run.settings_of(task, Row("plain"))["plain"]
    runs = [
        (each["seed"], each["plain"])
        for each in records
        if each["task"] == name and each["seed"] in seeds and not each["settings"]["model"]
        and each["settings"]["plain"] == plain and "quality" in each["plain"]
    ]  # fmt: skip
    runs = list({each["seconds"]: (seed, each) for seed, each in runs}.values())  # shared by the rows of a block
    qualities = dict(sorted((seed, each["quality"]) for seed, each in runs))
    return {
        "about": task.about,
        "measure": task.measure,
        "higher_is_better": task.higher_is_better,
        "settings": shown(plain),
        "margin": task.margin,
        "grid": {key: list(values) for key, values in task.grid.items()},
        "at_edge": tune.at_edge(record),
        "tuning_seeds": record["seeds"] if record else [],
        "values": list(qualities.values()),
        "runs": len(runs),
        "identical": all(each["quality"] == qualities[seed] for seed, each in runs),
        **{key: pairs.median([each[key] for _, each in runs]) for key in ("seconds", "step_us", "peak_mib") if runs},
    }


def write(found: Mapping[str, Any]) -> None:
    """Write docs/evidence/results.json and the pages."""
    pages.write(found, DOCS)
