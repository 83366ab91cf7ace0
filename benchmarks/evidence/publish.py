"""Results as JSON, and from it docs/evidence.md, docs/algorithms/index.md and the tables in the methods' cards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import table

from evidence import pairs, run, tune
from evidence.rows import Row, shown
from evidence.tasks import TASKS

DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- What follows is written by `nox -s evidence -- --publish`. -->"
BEGIN, END = "<!-- evidence -->", "<!-- /evidence -->"
_BLOCK = re.compile(rf"{BEGIN}.*?{END}\n*", re.DOTALL)
_SOURCES = re.compile(r"^## (Sources?|References?)\b.*$", re.MULTILINE)


def results(rows: Sequence[Row], seeds: range) -> dict[str, Any]:
    """Everything that the tables say, from the file of measured pairs."""
    records, tuned = run.read(), tune.read()
    entries: dict[str, dict[str, Any]] = {"rows": {}, "recipes": {}}
    for row in rows:
        cells = {name: cell for name in row.tasks if (cell := _cell(records, row, name, row.seeds(seeds)))}
        if cells:
            symbol, why = pairs.verdict(cells)
            common = {key: value for key, value in (("both", row.both), ("model", row.model)) if value}
            settings = {**row.arguments, **common}
            edge = [name for name in cells if tune.at_edge(tuned.get(name, {}).get(row.name))]
            entry = {"settings": shown(settings), "verdict": symbol, "why": why, "at_edge": edge, "cells": cells}
            entries["recipes" if row.recipe else "rows"][row.name] = entry
    return {
        **run.made_with(),
        "commits": sorted({record["commit"] for record in records}),
        "seeds": list(seeds),
        "tasks": {name: _task(name, tuned, records, seeds) for name in TASKS},
        **entries,
    }


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
    return pairs.summary(found, TASKS[task].higher_is_better, TASKS[task].margin)


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


def write(found: Mapping[str, Any], docs: Path | None = None) -> None:
    """Write the JSON, both pages and the blocks of the cards that exist."""
    docs = docs or DOCS
    (docs / "evidence").mkdir(parents=True, exist_ok=True)
    (docs / "evidence" / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    page = docs / "evidence.md"
    text = page.read_text().partition(MARK)[0]
    page.write_text(f"{text}{MARK}\n\n{_evidence(found)}\n")
    (docs / "algorithms" / "index.md").write_text(_index(found, docs / "algorithms"))
    by_card: dict[Path, dict[str, Any]] = {}
    for name, entry in found["rows"].items():
        if card := _card_of(name, docs / "algorithms"):
            by_card.setdefault(card, {})[name] = entry
    for card, own in by_card.items():
        card.write_text(with_block(card.read_text(), _block(own, found)))


def _card_of(name: str, folder: Path) -> Path | None:
    """The card of a row: that of its name, or of the longest beginning of it that has one, such as sam of sam-adaptive."""
    while name and not (folder / f"{name}.md").exists():
        name = name.rpartition("-")[0]
    return folder / f"{name}.md" if name else None


def with_block(card: str, block: str) -> str:
    """A card with the block in place of an earlier one, or before its sources, or at its end."""
    text = _BLOCK.sub("", card)
    headings = list(_SOURCES.finditer(text))
    at = headings[-1].start() if headings else len(text)
    before, after = text[:at].rstrip("\n"), text[at:]
    return f"{before}\n\n{BEGIN}\n{block}\n{END}\n" + (f"\n{after}" if after else "")


def _block(rows: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What a card says: verdict and a line per task and row."""
    first = next(iter(rows.values()))
    body = [
        [*([f"`{name}`"] if len(rows) > 1 else []), *line]
        for name, entry in rows.items()
        for line in _lines(entry, found)
    ]
    head = ["row"] * (len(rows) > 1) + [
        "task",
        "plain",
        "with it",
        "gain, 95 % interval",
        "step ÷",
        "to target ÷",
        "memory ÷",
    ]
    settings = "; ".join(f"`{entry['settings']}`" for entry in rows.values())
    return "\n".join(
        [
            "## Measured here",
            "",
            f"{first['verdict']} {first['why']}.".strip(),
            "",
            table([head, *body]),
            "",
            f"{len(found['seeds'])} seeds each, {settings}. Gains are paired by seed, and positive where the method is better. "
            "[Protocol and all tables](../evidence.md).",
        ]
    )


def _lines(entry: Mapping[str, Any], found: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for name, cell in entry["cells"].items():
        label = f"{name}, {found['tasks'][name]['measure']}"
        if "error" in cell:
            lines.append([label, "", f"fails: {_one_line(cell['error'])}", "", "", "", ""])
            continue
        reached = "never" if cell["to_target"] is None else f"{cell['to_target']:.2f}"
        values = [f"{cell[kind]['mean']:.2f} ± {cell[kind]['deviation']:.2f}" for kind in ("plain", "row")]
        lines.append([label, *values, gain(cell), f"{cell['cost']:.2f}", reached, f"{cell['memory']['mean']:.2f}"])
    return lines


def _one_line(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 100 else f"{text[:99]}…"


def gain(cell: Mapping[str, Any]) -> str:
    """Mean and interval of the paired difference, in bold where the interval excludes 0."""
    if "error" in cell:
        return "fails"
    each = cell["gain"]
    text = f"{each['mean']:+.2f}"
    text = f"**{text}**" if each["low"] > 0 or each["high"] < 0 else text
    return f"{text} [{each['low']:+.2f}, {each['high']:+.2f}]"


def _index(found: Mapping[str, Any], folder: Path) -> str:
    """The page of all methods by verdict."""
    tasks = list(found["tasks"])
    lines = [
        "# Algorithms and optimizers, by what they give",
        "",
        "<!-- Written by `nox -s evidence -- --publish`. -->",
        "",
        "After reading this page you can choose what to try first. Each line is one method alone, on small tasks with real "
        "data, against a tuned plain baseline. A method for other models or sizes can give more than it does here; its card "
        "says what others have found. [Protocol, baselines and recipes](../evidence.md).",
        "",
        "- ✅ **worth it**: better at the same cost, or as good in less time, on some task, and worse on none",
        "- 🚧 **depends**: better on some task, but at a higher cost or worse on another; or it saves memory",
        "- ❗ **rarely**: none of this was measured here",
        "",
    ]
    counts = sum("gain" in cell for entry in found["rows"].values() for cell in entry["cells"].values())
    rows = [["", "method", *(f"gain on {name}" for name in tasks), "step ÷", "memory ÷", "why"]]
    for symbol in (pairs.WORTH, pairs.DEPENDS, pairs.RARELY, ""):
        for name, entry in sorted(found["rows"].items()):
            if entry["verdict"] == symbol:
                card = _card_of(name, folder)
                known = [cell for cell in entry["cells"].values() if "gain" in cell]
                rows.append(
                    [
                        symbol,
                        f"[{name}]({card.name if card else '../optimizers.md'})",
                        *(gain(entry["cells"][task]) if task in entry["cells"] else "" for task in tasks),
                        _range([cell["cost"] for cell in known]),
                        _range([cell["memory"]["mean"] for cell in known]),
                        entry["why"],
                    ]
                )
    measured = {card for name in found["rows"] if (card := _card_of(name, folder))}
    others = [
        card
        for card in sorted(folder.glob("*.md"))
        if card.name not in ("index.md", "matrix.md") and card not in measured
    ]
    lines += [table(rows), ""]
    lines += [
        "Gains in the measure of the task, paired by seed, with a 95 % interval; positive is better, and bold where the "
        f"interval excludes 0. {len(found['seeds'])} seeds. Of {counts} intervals, about {max(1, round(counts / 20))} would "
        "exclude 0 if no method had any effect.",
    ]
    if others:
        lines += ["", f"Not measured: {', '.join(f'[{card.stem}]({card.name})' for card in others)}."]
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _evidence(found: Mapping[str, Any]) -> str:
    """The generated part of docs/evidence.md."""
    about = ", ".join(f"{key}: {value}" for key, value in found["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    first, last = found["seeds"][0], found["seeds"][-1]
    seeds = f"Seeds {first} to {last} for rows, {first} to {last + len(found['seeds'])} for recipes"
    commits = ", ".join(filter(None, found["commits"]))
    lines = [f"Measured on {about}; {versions}; commit {commits}. {seeds}.", "", "## Baselines", ""]
    body = [
        [
            name,
            f"`{task['settings']}`",
            f"{task['measure']}: {_mean(task['values'])}",
            f"{task['seconds']:.1f}",
            f"{task['step_us'] / 1000:.1f}",
            f"{task['runs']}, {'identical' if task['identical'] else 'NOT identical'} by seed",
        ]
        for name, task in found["tasks"].items()
        if task["values"]
    ]
    lines += [table([["task", "tuned settings", "quality", "seconds", "ms per step", "runs"], *body]), ""]
    edge = [f"the baseline's on {name}" for name, task in found["tasks"].items() if task["at_edge"]]
    for name, entry in [*found["rows"].items(), *found["recipes"].items()]:
        edge += [f"that of `{name}` on {task}" for task in entry["at_edge"]]
    if edge:
        lines += [
            f"Learning rates at the edge of their grid, beyond which a better one may lie: {', '.join(edge)}.",
            "",
        ]
    lines += ["## Recipes", ""]
    if found["recipes"]:
        body = [_recipe(name, entry) for name, entry in sorted(found["recipes"].items())]
        head = ["recipe", "gain over the target", "time ÷ baseline's", "reaches the target", "first crossing ÷"]
        lines += [_headline(found), "", table([head, *body]), ""]
    else:
        lines += ["None was measured.", ""]
    for name, task in found["tasks"].items():
        lines += [f"## Every method on {name}", "", f"{task['about']}. Quality: {task['measure']}.", ""]
        body = [
            [entry["verdict"], f"`{row}`", *line[1:]]
            for row, entry in sorted(found["rows"].items())
            for line in _lines({"cells": {name: entry["cells"][name]} if name in entry["cells"] else {}}, found)
        ]
        head = ["", "row", "plain", "with it", "gain, 95 % interval", "step ÷", "to target ÷", "memory ÷"]
        lines += [table([head, *body]), ""]
    return "\n".join(lines).rstrip()


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    around = pairs.interval(values)
    return f"{around.mean:.2f} ± {around.deviation:.2f}"


def _headline(found: Mapping[str, Any]) -> str:
    """The quickest recipe of each task that reaches the target, and how many need at most half of the time."""
    best: dict[str, tuple[float, str]] = {}
    for name, entry in found["recipes"].items():
        for task, cell in entry["cells"].items():
            if "gain" in cell and reaches(cell):
                best[task] = min(best.get(task, (math.inf, "")), (cell["time"]["mean"], name))
    halved = sum(time <= 0.5 for time, _ in best.values())
    each = "; ".join(
        f"{task}: {time:.2f} of the time, by `{name.partition('/')[2]}`" for task, (time, name) in best.items()
    )
    return (
        f"On {halved} of {len(found['tasks'])} tasks a recipe reaches the tuned baseline's final quality in at most half of "
        f"its time. The quickest that reach it: {each or 'none'}."
    )


def reaches(cell: Mapping[str, Any]) -> bool:
    """Whether the mean final quality is at least plain's, and a loss of more than the task's margin is excluded."""
    return bool(cell["gain"]["mean"] >= 0 and cell["as_good"])


def _recipe(name: str, entry: Mapping[str, Any]) -> list[str]:
    link = f"[{name}](../benchmarks/speedrun/{name}.yaml)"
    (cell,) = entry["cells"].values()
    if "error" in cell:
        return [link, f"fails: {_one_line(cell['error'])}", "", "", ""]
    time = cell["time"]
    reached = "never" if cell["to_target"] is None else f"{cell['to_target']:.2f}"
    return [
        link,
        gain(cell),
        f"{time['mean']:.2f} [{time['low']:.2f}, {time['high']:.2f}]",
        "yes" if reaches(cell) else "no",
        reached,
    ]
