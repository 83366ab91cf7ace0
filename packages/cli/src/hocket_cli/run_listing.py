"""The runs below some folders, from what is on disk."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hocket.basics import run_files as files

#: How many folders deep runs are searched.
_DEPTH = 3
#: Seconds after which a run on another machine counts as silent.
_SILENT = 600.0
STATUSES = ("finished", "pruned", "failed", "interrupted", "running", "killed", "silent", "unknown")

#: The statuses of trials that are over, in the record of a sweep.
_SWEPT = ("finished", "pruned", "failed", "interrupted")


#: The last position of a run, and the latest, least and greatest value of each metric.
_Scanned = tuple[Mapping[str, float], Mapping[str, tuple[float, float, float]]]


@dataclass(slots=True)
class RunOnDisk:
    """A run, as far as its files say."""

    folder: Path
    name: str
    #: Its name among others: with the folders above it if another run has the same name.
    label: str
    #: Seconds since 1970, or None if unknown.
    began: float | None
    #: One of `STATUSES`, and how that is known.
    status: str
    reason: str
    position: Mapping[str, float] = field(default_factory=dict)
    #: Latest value of each metric, which may be NaN, and its least and greatest finite value.
    values: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    #: The metrics of the latest evaluation.
    evaluated: tuple[str, ...] = ()
    #: The metric that ranks checkpoints, and ``max`` or ``min``.
    best: tuple[str, str] | None = None


def find(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of runs: those given, and those below them, at most three folders deep. Sorted by path."""
    found: dict[Path, None] = {}
    for folder in folders:
        found.update(dict.fromkeys(_below(folder, _DEPTH)))
    return sorted(found)


def _below(folder: Path, depth: int) -> Iterable[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    names = {each.name for each in entries}
    if names & {files.MARK, files.METRICS, files.SUMMARY}:
        yield folder
    elif depth and "manifest.json" not in names:  # not within a checkpoint
        for each in entries:
            if each.name[0] != "." and each.is_dir(follow_symlinks=False):
                yield from _below(folder / each.name, depth - 1)


def read(folder: Path) -> RunOnDisk:
    """Return what the files of a run say. Never raises because of their content."""
    mark, summary = files.content(folder / files.MARK), files.content(folder / files.SUMMARY)
    return about(folder, mark, summary, lambda: _scanned(folder / files.METRICS))


def about(folder: Path, mark: Mapping[str, Any], summary: Mapping[str, Any], scan: Callable[[], _Scanned]) -> RunOnDisk:
    """Return what the contents of a run's files say.

    Args:
        scan: returns the last position and the values in the file of metrics, for runs without a final summary.
    """
    if summary.get("run") != mark.get("run", summary.get("run")):
        summary = {}  # of an earlier run in this folder
    status, reason = status_of(folder, summary)
    position: Mapping[str, float] = _numbers(summary.get("position"))
    values: Mapping[str, tuple[float, float, float]] = _values(summary.get("values"))
    if status not in ("finished", "failed", "interrupted"):  # what was logged since the summary was written
        position, values = scan()
    elif summary.get("stop_reason") and _as_trial(folder).get("status") == "pruned":
        status = "pruned"
    best, evaluated = summary.get("best"), summary.get("evaluated")
    if status == "unknown" and (trial := _as_trial(folder)):
        status, reason = trial["status"], str(trial.get("error") or f"{files.SWEEP} says {trial['status']}")
        metrics = {str(name): files.number(each) for name, each in trial["metrics"].items()}
        values = values or {name: (each, each, each) for name, each in metrics.items() if each is not None}
        evaluated = evaluated or [name for name in values if not name.startswith("train/")]
    ranked = [each for each in best if isinstance(each, str)] if isinstance(best, list) else []
    name = str(mark.get("name") or summary.get("name") or folder.name)
    return RunOnDisk(
        folder=folder,
        name=name,
        label=name,
        began=_began(mark, summary),
        status=status,
        reason=reason,
        position=position,
        values=values,
        evaluated=tuple(map(str, evaluated)) if isinstance(evaluated, list) else (),
        best=(ranked[0], ranked[1]) if len(ranked) == 2 else None,
    )


def tell_apart(runs: Sequence[RunOnDisk]) -> None:
    """Label runs of the same name by as many folders as differ, such as ``wide/trial-000`` for the trials of sweeps."""
    for each in runs:
        others = [other.folder for other in runs if other.name == each.name and other is not each]
        parts = each.folder.parts
        depths = range(2, len(parts) + 1) if others else ()
        each.label = str(each.folder) if others else each.name
        for depth in depths:
            if all(other.parts[-depth:] != parts[-depth:] for other in others):
                each.label = str(Path(*parts[-depth:]))
                break


def status_of(folder: Path, summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status of a run and how it is known.

    A process of this machine exists or not. Of other machines only the time of the last line is known.
    """
    status = summary.get("status")
    if status in ("finished", "failed", "interrupted"):
        error = summary.get("error") or summary.get("stop_reason")
        return status, str(error) if error else "its summary says so"
    if status != "running":
        return "unknown", f"there is no {files.SUMMARY}, which the logger 'jsonl' writes"
    process = summary.get("process")
    process = process if isinstance(process, dict) else {}
    age = time.time() - max((_changed(folder / name) for name in (files.SUMMARY, files.METRICS)), default=0.0)
    if process.get("host") == socket.gethostname() and isinstance(process.get("pid"), int):
        ticks = files.started(process["pid"])
        if ticks is not None and ticks == process.get("started"):
            return "running", f"process {process['pid']} exists"
        if process.get("started") is not None:
            return "killed", f"process {process['pid']} ended without recording why"
    where = f"it was begun on {process.get('host', 'an unknown machine')}, and last wrote {duration(age)} ago"
    return ("running" if age < _SILENT else "silent"), where


def _as_trial(folder: Path) -> Mapping[str, Any]:
    """Return what a sweep recorded about its trial in this folder when that ended; empty if it is not one."""
    trials = files.content(folder.parent / files.SWEEP).get("trials")
    for each in trials if isinstance(trials, list) else ():
        if isinstance(each, dict) and each.get("name") == folder.name and isinstance(each.get("metrics"), dict):
            return each if each.get("status") in _SWEPT else {}
    return {}


def latest_of(values: Mapping[str, tuple[float, float, float]], name: str) -> float | None:
    """Return the latest value of a metric, or None."""
    found = values.get(name)
    return None if found is None else found[0]


def duration(seconds: float) -> str:
    """Return a duration in words: ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, size, part, below in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86400, "h", 3600)):
        if seconds < size * {"min": 60, "h": 24, "d": math.inf}[unit]:
            return f"{int(seconds // size)} {unit} {int(seconds % size // below)} {part}"
    return ""


def _began(mark: Mapping[str, Any], summary: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(mark["began"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return files.finite(summary.get("fit_began"))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _numbers(value: Any) -> dict[str, float]:
    found = {name: files.finite(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in found.items() if name in files.POSITION and each is not None}


def _values(value: Any) -> dict[str, tuple[float, float, float]]:
    found: dict[str, tuple[float, float, float]] = {}
    for name, each in value.items() if isinstance(value, dict) else ():
        numbers = (
            [number for part in each if (number := files.number(part)) is not None] if isinstance(each, list) else []
        )
        if len(numbers) == 3:
            found[name] = (numbers[0], numbers[1], numbers[2])
    return found


def _scanned(path: Path) -> _Scanned:
    """Return the last position, and latest, least and greatest values, from the file itself."""
    position: dict[str, float] = {}
    values: dict[str, tuple[float, float, float]] = {}
    for line in files.objects(path):
        if "batch" in line:
            position = _numbers(line)
        for name, value in line.items():
            if name in files.POSITION or (latest := files.number(value)) is None:
                continue
            _, least, most = values.get(name, (latest, math.nan, math.nan))
            if math.isfinite(latest):  # any number is between NaN and NaN
                least, most = latest if not least <= latest else least, latest if not most >= latest else most
            values[name] = (latest, least, most)
    return position, values
