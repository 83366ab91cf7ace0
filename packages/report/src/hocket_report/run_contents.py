"""All files of a run that a page shows. Any of them may be missing, incomplete or written by somebody else."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.basics import run_files as files, safe_files
from hocket.basics.run_folder import is_url
from hocket.errors import WrongValue
from hocket_cli import document, run_listing
from hocket_report.logged_values import Logged, read as read_logged

#: Larger configurations are not shown.
_MOST_BYTES = 200_000


@dataclass(slots=True)
class Run:
    """A run to show."""

    about: run_listing.RunOnDisk
    logged: Logged
    summary: Mapping[str, Any]
    profile: Mapping[str, Any]
    #: The configuration as values by dotted key, and the file that it is from.
    configuration: Mapping[str, str]
    configured_by: str
    checkpoints: list[dict[str, Any]]
    #: Where the checkpoints are if they cannot be listed, such as a URL.
    checkpoints_elsewhere: str
    media: list[dict[str, Any]]
    #: What cannot be read and is not shown.
    damaged: list[str]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.about.folder


def check(folder: Path) -> None:
    """Raise ValueError, for people, if the folder does not belong to a run."""
    if not folder.is_dir():
        given = "is a file" if folder.exists() else "does not exist"
        raise WrongValue(f"{folder} {given}. Give the folder of a run, such as runs/a; `hocket runs` lists them.")
    if not any((folder / name).is_file() for name in (files.MARK, files.METRICS, files.SUMMARY)):
        below = run_listing.find([folder])
        write = (
            f"It has runs: {shlex.join(['hocket', 'report', *map(str, below[:3])])}"
            if below
            else "`hocket runs` lists runs"
        )
        raise WrongValue(
            f"{folder} is no run's folder: it has no {files.MARK} and no {files.METRICS}, which runs write with loggers: "
            f"[jsonl]. {write}."
        )


def read(folder: Path, most: int, advance: Callable[[], None]) -> Run:
    """Read a run, each of its files once.

    Args:
        most: the points of a curve that are kept.
        advance: called while long files are read.
    """
    names = (files.MARK, files.SUMMARY, "profile/summary.json")
    mark, summary, profile = (files.content(folder / name, within=folder) for name in names)
    damaged = [
        f"{folder / name} {_fault(folder, name)}"
        for name, content in zip(names, (mark, summary, profile), strict=True)
        if os.path.lexists(folder / name) and not content
    ]
    logged = read_logged(folder / files.METRICS, most, advance)
    if logged.damaged:
        lines = "1 line" if logged.damaged == 1 else f"{logged.damaged} lines"
        damaged.append(f"{folder / files.METRICS} has {lines} that cannot be read")
    if logged.problem:
        damaged.append(f"{folder / files.METRICS} {logged.problem}")
    ranges = {name: curve.range for name, curve in logged.series.items()}
    about = run_listing.about(folder, mark, summary, lambda: (logged.last, ranges))
    if summary.get("run") != mark.get("run", summary.get("run")):
        summary = {}
    configuration, configured_by = _configuration(folder, logged, damaged)
    checkpoints, elsewhere = _checkpoints(folder, mark)
    return Run(
        about=about,
        logged=logged,
        summary=summary,
        profile=profile,
        configuration=configuration,
        configured_by=configured_by,
        checkpoints=checkpoints,
        checkpoints_elsewhere=elsewhere,
        media=list(files.objects(folder / files.MEDIA / files.METRICS, within=folder)),
        damaged=damaged,
    )


def _fault(folder: Path, name: str) -> str:
    try:
        safe_files.content(folder / name, within=folder)
    except OSError as error:
        return f"is not read: {error.strerror}"
    return "is damaged"


def _configuration(folder: Path, logged: Logged, damaged: list[str]) -> tuple[dict[str, str], str]:
    path = folder / files.CONFIG
    try:
        raw = safe_files.content(path, _MOST_BYTES, within=folder)
        found = document.parse(raw.decode("utf-8", errors="replace"), str(path)).plain()
        return dict(_flat(found, "")), files.CONFIG
    except FileNotFoundError:
        pass
    except (OSError, document.ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        damaged.append(f"{path} is not shown: {str(why).rstrip('.')}")
    given = {name: value for name, value in logged.hyperparameters.items() if value is not None}
    return dict(_flat(given, "")), "the arguments of the Trainer"


def _flat(value: Any, path: str, depth: int = 0) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value and depth < 20:
        found = (_flat(item, f"{path}.{key}" if path else str(key), depth + 1) for key, item in value.items())
        return [pair for pairs in found for pair in pairs]
    try:
        text = document.flow(value)
    except RecursionError:
        text = str(value)
    return [(path, text if len(text) <= 2000 else f"{text[:2000]}…")]


def _checkpoints(folder: Path, mark: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return name, position, time and metrics of this run's checkpoints, oldest first; or where they are."""
    where = mark.get("checkpoints")
    if isinstance(where, str) and is_url(where):
        return [], where
    found = []
    try:
        manifests = sorted((folder / (where if isinstance(where, str) else ".")).glob("*/manifest.json"))
    except (OSError, ValueError):
        manifests = []
    for path in manifests:
        about = files.content(path).get("about")
        if not isinstance(about, dict) or files.finite(about.get("written")) is None:
            continue
        owner = about.get("run")
        if isinstance(owner, dict) and mark.get("run") not in (None, owner.get("id")):
            continue
        position, metrics = about.get("timestamp"), about.get("metrics")
        found.append(
            {
                "name": path.parent.name,
                "written": float(about["written"]),
                "bytes": _bytes(path.parent),
                "position": position if isinstance(position, dict) else {},
                "metrics": {name: each for name, each in metrics.items() if files.finite(each) is not None}
                if isinstance(metrics, dict)
                else {},
            }
        )
    return sorted(found, key=lambda each: each["written"]), ""


def _bytes(folder: Path) -> int:
    try:
        return sum(each.stat().st_size for each in folder.iterdir())
    except OSError:
        return 0
