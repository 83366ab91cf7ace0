"""The pages of results: docs/explanation/evidence.md, docs/algorithms/index.md and the tables in the methods' cards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import table

from evidence import pairs, rows

MARK = "<!-- What follows is written by `nox -s evidence -- --publish`. -->"
BEGIN, END = "<!-- evidence -->", "<!-- /evidence -->"
HEAD, HEAD_END = "<!-- verdict -->", "<!-- /verdict -->"
_BLOCK = re.compile(rf"{BEGIN}.*?{END}\n*", re.DOTALL)
_HEAD = re.compile(rf"{HEAD}.*?{HEAD_END}\n*", re.DOTALL)
_SOURCES = re.compile(r"^## (Sources?|References?)\b.*$", re.MULTILINE)


def write(found: Mapping[str, Any], docs: Path) -> None:
    """Write the JSON, both pages and the blocks of the cards that exist."""
    (docs / "evidence").mkdir(parents=True, exist_ok=True)
    (docs / "evidence" / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    page = docs / "explanation" / "evidence.md"
    text = page.read_text().partition(MARK)[0]
    page.write_text(f"{text}{MARK}\n\n{_evidence(found)}\n")
    (docs / "algorithms" / "index.md").write_text(_index(found, docs / "algorithms"))
    by_card: dict[Path, dict[str, Any]] = {}
    for name, entry in found["rows"].items():
        if card := _card_of(name, docs / "algorithms"):
            by_card.setdefault(card, {})[name] = entry
    absent = reasons_without(found)
    for card in cards(docs / "algorithms"):
        text = _BLOCK.sub("", card.read_text())
        if own := by_card.get(card):
            text = with_block(text, _block(own, found))
            head = f"**Measured here:** {_verdicts(own)} ([tables](#measured-here))."
        else:
            why = absent.get(card.stem, "there is no row for it in rows.yaml.")
            head = f"**Not in the [tables of methods](index.md):** {why}"
        card.write_text(with_head(text, head))


def cards(folder: Path) -> list[Path]:
    """The cards of methods."""
    return [card for card in sorted(folder.glob("*.md")) if card.name not in ("index.md", "matrix.md")]


def reasons_without(found: Mapping[str, Any]) -> dict[str, str]:
    """Why a row of rows.yaml is in no table, by its name."""
    declared = rows.read(rows.FILE)
    return {
        name: (settings or {}).get("skip", "It was added after the published run.")
        for name, settings in declared.items()
        if name not in found["rows"] and not name.startswith("x-")
    }


def with_head(card: str, head: str) -> str:
    """A card with the head in place of an earlier one, below its title."""
    title, _, rest = _HEAD.sub("", card).partition("\n")
    return f"{title}\n\n{HEAD}\n{head}\n{HEAD_END}\n" + (f"\n{rest}" if (rest := rest.lstrip("\n")) else "")


def _verdicts(own: Mapping[str, Any]) -> str:
    """The verdict of a card's row, or those of its rows."""
    several = len(own) > 1
    return "; ".join(f"{f'`{name}` ' * several}{_verdict(entry)}" for name, entry in own.items())


def _verdict(entry: Mapping[str, Any]) -> str:
    return f"{entry['verdict']} {entry['why']}".strip()


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


def _block(own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What a card says: verdict and a line per task and row."""
    body = [
        [*([f"`{name}`"] if len(own) > 1 else []), *line]
        for name, entry in own.items()
        for line in _lines(entry, found)
    ]
    head = ["row"] * (len(own) > 1) + [
        "task",
        "plain",
        "with it",
        "gain, 95 % interval",
        "step ÷",
        "to target ÷",
        "memory ÷",
    ]
    settings = "; ".join(f"`{entry['settings']}`" for entry in own.values())
    again = _measured_again({name: entry for name, entry in own.items()})
    return "\n".join(
        [
            "## Measured here",
            "",
            f"{_verdicts(own)}.",
            "",
            table([head, *body]),
            "",
            f"{len(found['seeds'])} seeds each, {settings}. Gains are paired by seed, and positive where the method is better; "
            f"bold ones remain after the correction for all comparisons. "
            f"[Protocol and all tables](../explanation/evidence.md).{again}",
        ]
    )


def _measured_again(entries: Mapping[str, Any]) -> str:
    """Which cells are not of the run of the tables, and how they were measured."""
    by_origin: dict[str, list[str]] = {}
    for name, entry in entries.items():
        for task, cell in entry["cells"].items():
            if origin := cell.get("measured"):
                how = f"(commit {', '.join(origin['commits'])}; {_about(origin)})"
                if not pairs.timed(cell):
                    how += ". Other programs ran on that machine, so their times are not shown until the next whole run"
                by_origin.setdefault(how, []).append(name if name.startswith(f"{task}/") else f"{name} on {task}")
    return "".join(
        f"\n\nMeasured apart from the other rows, each beside plain runs of its own in turns: {', '.join(which)} {how}."
        for how, which in by_origin.items()
    )


def _about(found: Mapping[str, Any]) -> str:
    about = ", ".join(f"{key}: {value}" for key, value in found["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{about}; {versions}"


def _lines(entry: Mapping[str, Any], found: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for name, cell in entry["cells"].items():
        label = f"{name}, {found['tasks'][name]['measure']}"
        if "error" in cell:
            lines.append([label, "", f"fails: {_one_line(cell['error'])}", "", "", "", ""])
            continue
        values = [f"{cell[kind]['mean']:.2f} ± {cell[kind]['deviation']:.2f}" for kind in ("plain", "row")]
        lines.append([label, *values, gain(cell), *_times(cell), f"{cell['memory']['mean']:.2f}"])
    return lines


def _times(cell: Mapping[str, Any]) -> list[str]:
    """Cost of a step, and time to the target."""
    if not pairs.timed(cell):
        return ["not timed", "never" if cell["to_target"] is None else "not timed"]
    return [f"{cell['cost']:.2f}", "never" if cell["to_target"] is None else f"{cell['to_target']:.2f}"]


def _one_line(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 100 else f"{text[:99]}…"


def gain(cell: Mapping[str, Any]) -> str:
    """Mean and interval of the paired difference, in bold where it remains after the correction for many comparisons."""
    if "error" in cell:
        return "fails"
    if cell.get("warned"):
        return "no effect"
    each = cell["gain"]
    text = f"{each['mean']:+.2f}"
    text = f"**{text}**" if pairs.shows(cell, "gain") else text
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
        "says what others have found. [Protocol, baselines and recipes](../explanation/evidence.md). "
        "[What each can be combined with](matrix.md).",
        "",
        "- ✅ **worth it**: as good on all tasks where it was measured, and on some better at the same cost, or faster",
        "- 🚧 **depends**: better or faster on some task, but at a higher cost, or a loss on another is not excluded; or it "
        "saves memory",
        "- ❗ **not shown**: none of this was shown here",
        "",
    ]
    lines_of_table = [["", "method", *(f"gain on {name}" for name in tasks), "step ÷", "memory ÷", "why"]]
    for symbol in (pairs.WORTH, pairs.DEPENDS, pairs.NOT_SHOWN, ""):
        for name, entry in sorted(found["rows"].items()):
            if entry["verdict"] == symbol:
                card = _card_of(name, folder)
                known = [cell for cell in entry["cells"].values() if "gain" in cell]
                lines_of_table.append(
                    [
                        symbol,
                        f"[{name}]({card.name if card else '../reference/optimizers.md'})",
                        *(gain(entry["cells"][task]) if task in entry["cells"] else "" for task in tasks),
                        _range([cell["cost"] for cell in known if pairs.timed(cell)]),
                        _range([cell["memory"]["mean"] for cell in known]),
                        entry["why"],
                    ]
                )
    measured = {card for name in found["rows"] if (card := _card_of(name, folder))}
    lines += [table(lines_of_table), ""]
    lines += [
        f"Gains in the measure of the task, paired by seed ({len(found['seeds'])} seeds), with a 95 % interval; positive is "
        "better, and bold ones remain after a correction for the number of comparisons. "
        f"{_strength(found)}{_measured_again(found['rows'])}",
    ]
    absent = reasons_without(found)
    others = {card.stem: absent.pop(card.stem, "No row.") for card in cards(folder) if card not in measured} | absent
    if others:
        shown_names = {name: f"[{name}]({card.name})" if (card := _card_of(name, folder)) else name for name in others}
        lines += ["", "Not measured:", ""]
        lines += [f"- {shown_names[name]}: {_lowered(why)}" for name, why in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _strength(found: Mapping[str, Any]) -> str:
    """How much the comparisons of rows can show."""
    cells = [
        (found["tasks"][task]["margin"], cell)
        for entry in found["rows"].values()
        for task, cell in entry["cells"].items()
        if pairs.compared(cell)
    ]
    seeds = len(found["seeds"])
    apart = sum(cell["gain"]["low"] > 0 or cell["gain"]["high"] < 0 for _, cell in cells)
    remain = sum(pairs.shows(cell, "gain") for _, cell in cells)
    wide = sum(cell["gain"]["mean"] - cell["gain"]["low"] > margin for margin, cell in cells)
    level = pairs.FALSE_DISCOVERIES * max(1, remain) / max(1, len(cells))
    by_chance = max(1, round(len(cells) / 20))
    return (
        f"Of {len(cells)} intervals {apart} exclude 0, where about {by_chance} would if no method had any effect; {remain} "
        f"remain after the correction of Benjamini and Hochberg. {seeds} seeds show little: a single test finds an effect in "
        f"four of five repetitions if it is {pairs.detectable(seeds):.1f} standard deviations of the paired differences, and "
        f"after the correction if it is {pairs.detectable(seeds, level):.1f}. So a method that is worse on no task need not be "
        f"as good: in {wide} of {len(cells)} comparisons half of the interval is wider than the task's margin, so that not "
        "even a method without any effect would be shown to be as good."
    )


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _evidence(found: Mapping[str, Any]) -> str:
    """The generated part of docs/explanation/evidence.md."""
    first, last = found["seeds"][0], found["seeds"][-1]
    seeds = f"Seeds {first} to {last} for rows, {first} to {last + len(found['seeds'])} for recipes"
    commits = ", ".join(filter(None, found["commits"]))
    again = _measured_again({**found["rows"], **found["recipes"]})
    lines = [
        f"Measured on {_about(found)}; commit {commits}. {seeds}.{again}",
        "",
        "## How much this can show",
        "",
        _strength(found),
        "",
        "## Baselines",
        "",
    ]
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
    longest = [
        name
        for name, task in found["tasks"].items()
        if task["settings"].endswith(f"duration: {task['grid']['duration'][-1]}")
    ]
    lines += [_tuned(found, longest), ""]
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
        if worth := _worth(name, found):
            lines += [worth, ""]
        body = [
            [entry["verdict"], f"`{row}`", *line[1:]]
            for row, entry in sorted(found["rows"].items())
            for line in _lines({"cells": {name: entry["cells"][name]} if name in entry["cells"] else {}}, found)
        ]
        head = ["", "row", "plain", "with it", "gain, 95 % interval", "step ÷", "to target ÷", "memory ÷"]
        lines += [table([head, *body]), ""]
    return "\n".join(lines).rstrip()


def _tuned(found: Mapping[str, Any], longest: Sequence[str]) -> str:
    """What of the baselines was tuned, and what was not."""
    grids = "; ".join(
        f"{name}: lr {', '.join(f'{rate:g}' for rate in task['grid']['lr'])}, duration {', '.join(task['grid']['duration'])}"
        for name, task in found["tasks"].items()
    )
    at_end = (
        f" The longest duration of the grid was chosen on {', '.join(longest)}, so a longer one may be better still."
        if longest
        else ""
    )
    return (
        f"Tuned were the learning rate, in steps of about 3, and the duration ({grids}), with {_seeds_of_tuning(found)} "
        f"seeds a point.{at_end} Not tuned were batch size, weight decay, betas, warm-up and clipping."
    )


def _seeds_of_tuning(found: Mapping[str, Any]) -> str:
    return " or ".join(sorted({str(len(task["tuning_seeds"])) for task in found["tasks"].values()}))


def _worth(name: str, found: Mapping[str, Any]) -> str:
    """What a task's baseline is worth: beside tables of n-grams, and beside controls that change what was not tuned."""
    task = found["tasks"][name]
    references = task.get("references", {})
    if not references or not task["values"]:
        return ""
    sign = 1 if task["higher_is_better"] else -1
    mean, (low, high) = fmean(task["values"]), (min(task["values"]), max(task["values"]))
    told = ", ".join(f"{value:.2f} ({label})" for label, value in references.items())
    beaten = [label for label, value in references.items() if sign * mean > sign * value]
    missed = [label for label in references if label not in beaten]
    text = f"Tables of n-grams, counted in the same training windows, reach {told}. The baseline reaches {mean:.2f}"
    text += f" (seeds {low:.1f} to {high:.1f})"
    text += f", better than the {beaten[-1]}s" if beaten else ""
    text += f" and not as good as the {missed[0]}s" if missed else ""
    text += ". So it has learned little, and a gain over it may be one of the first steps only." if missed else "."
    for label, entry in found["recipes"].items():
        cell = entry["cells"].get(name, {})
        if not label.startswith(f"{name}/control-") or not pairs.compared(cell) or cell["gain"]["low"] <= 0:
            continue
        control = cell["row"]["mean"]
        weaker = [
            f"`{row}` ({other['row']['mean']:.2f})"
            for row, each in sorted(found["rows"].items())
            if pairs.compared(other := each["cells"].get(name, {}))
            and other["gain"]["low"] > 0
            and sign * other["row"]["mean"] < sign * control
        ]
        text += f" The baseline with `{entry['settings']}` reaches {control:.2f}"
        text += f", better than with {', '.join(weaker)}." if weaker else "."
    return text


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
            if "gain" in cell and reaches(cell) and pairs.timed(cell):
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
    link = f"[{name}](../../benchmarks/speedrun/{name}.yaml)"
    (cell,) = entry["cells"].values()
    if "error" in cell:
        return [link, f"fails: {_one_line(cell['error'])}", "", "", ""]
    time = cell["time"]
    told = f"{time['mean']:.2f} [{time['low']:.2f}, {time['high']:.2f}]" if pairs.timed(cell) else "not timed"
    return [link, gain(cell), told, "yes" if reaches(cell) else "no", _times(cell)[1]]
