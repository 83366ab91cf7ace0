"""Judgements as text, and in the folder of a run, from which `hocket report` shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hocket.basics import run_files
from hocket.help import optional_packages
from hocket.plugins import PluginError
from hocket_tools.judging.judgement import How, Judgement
from hocket_tools.judging.paired import Difference
from hocket_tools.progress import say
from hocket_tools.resampling import Estimate

#: The most classes of a confusion matrix in a terminal, and of a table of classes.
_MATRIX, _TABLE = 20, 100


def text(found: Judgement, how: How) -> str:
    """Return the metrics, classes, confusion matrix, worst samples and corruptions as tables."""
    parts = [f"{found.run} on {found.label}: {len(found.samples)} samples"]
    rows = [[name, _number(each.value), _interval(each)] for name, each in found.estimates.items()]
    parts.append(table(["metric", "value", f"{how.level * 100:g} % interval"], rows))
    parts += _notes(found.estimates)
    for name, (head, lines) in found.tables().items():
        if name != "confusion" or len(lines) <= _MATRIX:
            head = ["target \\ predicted", *head[1:]] if name == "confusion" else head
            shown = [[_number(each) for each in row] for row in (lines[:_TABLE] if name == "classes" else lines)]
            parts.append(("\nworst\n" if name == "worst" else "\n") + table(head, shown))
    if found.corruption_error is not None:
        severities = list(next(iter(found.corruptions.values())))
        rows = [
            [kind, *(_number(each[severity]) for severity in severities), _number(sum(each.values()) / len(each))]
            for kind, each in found.corruptions.items()
        ]
        parts.append("\n" + table(["error", *(f"severity {each}" for each in severities), "mean"], rows))
        error = found.corruption_error
        parts.append(f"mean corruption error {_number(error.value)} ({_interval(error)})")
    return "\n".join(parts)


def differences(first: str, second: str, found: Mapping[str, Difference], how: How) -> str:
    """Return the table of a comparison."""
    rows = [
        [
            name, _number(each.first), _number(each.second), f"{each.difference.value:+.4g}", _interval(each.difference),
            "< 0.0001" if each.p_value < 0.0001 else f"{each.p_value:.4f}", each.test,
        ]
        for name, each in found.items()
    ]  # fmt: skip
    head = ["metric", first, second, "difference", f"{how.level * 100:g} % interval", "p", "test"]
    return "\n".join([table(head, rows), *_notes({name: each.difference for name, each in found.items()})])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width; all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _interval(found: Estimate) -> str:
    return "none" if math.isnan(found.low) else f"{found.low:.4g} to {found.high:.4g}"


def _notes(estimates: Mapping[str, Estimate]) -> list[str]:
    """Return a line for each note, with the names of all that have it."""
    notes = dict.fromkeys(each.note for each in estimates.values() if each.note)
    return [f"{', '.join(name for name, each in estimates.items() if each.note == note)}: {note}" for note in notes]


def marked(folder: Path) -> str:
    """Return the identity of the run in a folder. Raises PluginError for any other folder, and for a file."""
    mark = run_files.content(folder / run_files.MARK)
    if not isinstance(mark.get("run"), str):
        raise PluginError(
            f"--report adds to the folder of a run, and {folder} has no {run_files.MARK}, which runs write with loggers: "
            "[jsonl]. Name the folder of a run, or omit --report."
        )
    return str(mark["run"])


def into_run(folder: Path, found: Judgement, images: Sequence[Any]) -> None:
    """Add metrics, classes and worst samples to the media of a run, which `hocket report` shows. Raises PluginError."""
    media = optional_packages.module("hocket_loggers.media", "--report")
    run, path, prefix = marked(folder), folder / run_files.METRICS, f"judgement/{found.label}"
    batches = [line["batch"] for line in run_files.objects(path) if isinstance(line.get("batch"), int)]
    metrics = [[name, each.value, each.low, each.high] for name, each in found.estimates.items()]
    tables = {"metrics": (["metric", "value", "low", "high"], metrics), **found.tables()}
    with closing(media.Media()) as writer:
        for name, (head, rows) in tables.items():
            writer.table(path, run, {"table": f"{prefix}/{name}", "batch": max([0, *batches])}, head, rows)
        if images:
            writer.images(path, run, {"images": f"{prefix}/worst", "batch": max([0, *batches])}, images)
    where = folder / run_files.MEDIA
    say(f"{prefix}: tables{' and images' if images else ''} in {where}; `hocket report {folder}` shows them.")
