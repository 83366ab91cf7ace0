"""``hocket runs``: list the runs on this disk, from the files of the logger ``jsonl``."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import operator
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.basics.direction import mode_of
from hocket.basics.safe_files import printable
from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli import run_listing
from hocket_cli.common_options import json_text
from hocket_cli.run_listing import RunOnDisk

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, ">": operator.gt, "<": operator.lt,
    "=": operator.eq,
}  # fmt: skip
_FIELDS = ("name", "began", "status", "position", "duration")
#: Columns of metrics without --metrics, and characters of a text in the table.
_MOST, _LONGEST = 3, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add folders, columns, filters and order."""
    parser.add_argument(
        "folders", nargs="*", default=["runs"], metavar="folder", help="runs, or folders of runs; runs/ unless given"
    )
    parser.add_argument("--metrics", metavar="NAME,…", help="the metrics to show, such as test/accuracy,test/loss")
    parser.add_argument("--sort", metavar="NAME", help=f"a metric, its best run first; or {', '.join(_FIELDS)}")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="WHAT",
        help="'test/accuracy>0.9', a status, or a pattern of names such as 'sweep-*'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything about these runs as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    for each in args.folders:
        if not Path(each).is_dir():
            given = f"there is no folder {each!r}" if not Path(each).exists() else f"{each!r} is a file"
            raise PluginError(
                f"Runs cannot be listed: {given}. Write hocket runs FOLDER, the folder= of their Trainers."
            )
    runs = [run_listing.read(folder) for folder in run_listing.find(map(Path, args.folders))]
    run_listing.tell_apart(runs)
    if not runs:
        raise PluginError(
            f"There is no run in {', '.join(args.folders)}: no folder there has a run.json or metrics.jsonl. Runs write them "
            "with loggers: [jsonl]."
        )
    for condition in args.filter:
        runs = _filtered(runs, condition)
    names = _columns(runs, args.metrics)
    _sort(runs, args.sort, args.reverse)
    if args.json:
        print(json_text([_row(each) for each in runs]))
    elif not runs:
        print("No run passes the filters.")
    else:
        _print(runs, names, _metric_of(runs, args.sort))
    return 0


def _known(runs: Sequence[RunOnDisk], name: str, also: Sequence[str] = ()) -> str:
    """Return the name if a run has this metric. Raises PluginError with the nearest one."""
    known = dict.fromkeys(metric for each in runs for metric in each.values)
    if name in known or name in also:
        return name
    near = difflib.get_close_matches(name, [*known, *also], 1, 0.5)
    there = f"They have {', '.join([*known][:12])}{' …' if len(known) > 12 else ''}." if known else "They have none."
    raise PluginError(f"No run here has the metric {name!r}. {f'Did you mean {near[0]!r}? ' if near else ''}{there}")


def _filtered(runs: list[RunOnDisk], condition: str) -> list[RunOnDisk]:
    found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|!=|==|>|<|=)\s*(.+?)\s*", condition)
    if found is None:
        passing = [each for each in runs if each.status == condition or _named(each, condition)]
        if runs and not passing and not set("*?[") & set(condition):
            known = dict.fromkeys([*run_listing.STATUSES, *(each.label for each in runs)])
            near = difflib.get_close_matches(condition, known, 1, 0.5)
            raise PluginError(
                f"--filter {condition!r}: no run here has this name or status. "
                f"{f'Did you mean {near[0]!r}? ' if near else ''}Statuses are {', '.join(run_listing.STATUSES)}; a pattern has "
                "an asterisk, such as 'sweep-*'."
            )
        return passing
    name, comparison, text = found.groups()
    try:
        bound = float(text)
    except ValueError:
        raise PluginError(
            f"--filter {condition!r} compares {name!r} with {text!r}, which is not a number. Write --filter "
            "'test/accuracy>0.9', or a pattern of names such as 'sweep-*'."
        ) from None
    if not runs:
        return runs
    _known(runs, name)
    latest = [(each, run_listing.latest_of(each.values, name)) for each in runs]
    return [each for each, value in latest if value is not None and _COMPARISONS[comparison](value, bound)]


def _named(each: RunOnDisk, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (each.name, each.label))


def _columns(runs: Sequence[RunOnDisk], given: str | None) -> list[str]:
    if given is not None:
        return [_known(runs, name) for name in given.split(",") if name] if runs else []
    counts: dict[str, int] = {}
    for each in runs:
        for name in each.evaluated or [name for name in each.values if name.startswith("train/")]:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])[:_MOST]


def _metric_of(runs: Sequence[RunOnDisk], sort: str | None) -> str | None:
    return sort if sort is not None and any(sort in each.values for each in runs) else None


def _mode(runs: Sequence[RunOnDisk], name: str) -> str | None:
    """Return whether higher or lower is better: as a run ranks its checkpoints, or as the name says; None if unknown."""
    ranked = next((each.best[1] for each in runs if each.best and each.best[0] == name), None)
    return ranked or mode_of(name)


def _sort(runs: list[RunOnDisk], name: str | None, reverse: bool) -> None:
    name = name or "began"
    if runs:
        _known(runs, name, _FIELDS)
    keys: dict[str, Callable[[RunOnDisk], Any]] = {
        "name": lambda each: each.label,
        "began": lambda each: each.began,
        "status": lambda each: each.status,
        "position": lambda each: each.position.get("batch"),
        "duration": lambda each: each.position.get("seconds"),
    }
    mode = "min" if name in keys else _mode(runs, name)
    if runs and mode is None and not reverse:
        print(
            f"hocket: {name!r} does not say whether higher is better; the highest is first. Write --reverse for the lowest.",
            file=sys.stderr,
        )
    key = keys.get(name, lambda each: run_listing.latest_of(each.values, name))
    known = sorted((each for each in runs if not _missing(key(each))), key=key, reverse=(mode != "min") ^ reverse)
    runs[:] = [*known, *(each for each in runs if _missing(key(each)))]


def _missing(value: Any) -> bool:
    """Whether there is no value to sort by: None or NaN."""
    return value is None or value != value


def _row(each: RunOnDisk) -> dict[str, Any]:
    values = {
        name: dict(zip(("latest", "least", "greatest"), found, strict=True)) for name, found in each.values.items()
    }
    return {
        "name": each.name, "folder": str(each.folder), "began": each.began, "status": each.status, "reason": each.reason,
        "position": dict(each.position), "values": values,
    }  # fmt: skip


def _print(runs: Sequence[RunOnDisk], names: Sequence[str], sorted_by: str | None) -> None:
    ranked = sorted_by or next((each.best[0] for each in runs if each.best), None) or next(iter(names), None)
    head = ["name", "began", "status", "position", "trained", *names]
    mode = None if ranked is None else _mode(runs, ranked)
    if ranked is not None:
        head.append(f"{'lowest' if mode == 'min' else 'highest'} {ranked}")
    rows = []
    for each in runs:
        at, seconds = each.position, each.position.get("seconds")
        row = [
            each.label,
            "" if each.began is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began)),
            each.status,
            f"ep {at['epoch']:g} ba {at['batch']:g}" if "epoch" in at and "batch" in at else "",
            "" if seconds is None else run_listing.duration(seconds),
            *(_text(run_listing.latest_of(each.values, name)) for name in names),
        ]
        if ranked is not None:
            found = each.values.get(ranked)
            row.append("" if found is None else _text(found[1 if mode == "min" else 2]))
        rows.append(row)
    head, *rows = [[_cell(each) for each in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    for each in runs:
        if each.status in ("failed", "killed", "silent"):
            print(f"{_cell(each.label)}: {each.status}: {_cell(' '.join(each.reason.split()))}")
    if any(each.status == "unknown" for each in runs):
        print("unknown: no status was recorded. Runs with loggers: [jsonl] record status, position and metrics.")


def _cell(text: str) -> str:
    """Return a text of a file as it is shown in one line: of limited length, and without what controls a terminal."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…").replace("\n", "\\n")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


command = Command("List the runs on this disk: status, position, metrics", add_arguments, run)
