"""Names and formats of the files in a run's folder, and how to read them when they are incomplete or not ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Files and folders within a run's folder: who owns it, what was logged, state and plan, images and tables, configuration.
MARK, METRICS, SUMMARY, MEDIA, CONFIG = "run.json", "metrics.jsonl", "summary.json", "media", "config.yaml"
#: The record of a sweep, in the folder above those of its trials.
SWEEP = "sweep.json"
#: The keys of a line of metrics that are a position.
POSITION = ("epoch", "batch", "sample", "token", "seconds")
#: Longer files of one object are not read.
_MOST_BYTES = 20_000_000


def parsed(line: bytes | str) -> dict[str, Any]:
    """Return the JSON object of a line; an empty dict if it is none, such as half a line of a killed run."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, and skip malformed lines. An unreadable file yields nothing."""
    return filter(None, lines(path))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Parse each line of a JSON Lines file. Yield an empty dict for a malformed line, and skip a truncated last line."""
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            found = parsed(line)
            if found or line.endswith(b"\n"):
                yield found


def content(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an empty dict if it cannot be read."""
    with suppress(OSError):
        if path.stat().st_size <= _MOST_BYTES:
            return parsed(path.read_bytes())
    return {}


def number(value: Any) -> float | None:
    """Return a value of a line as a number, ``"NaN"`` and ``"Infinity"`` too; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    try:
        float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf
    return value


def finite(value: Any) -> float | None:
    """Return a value as a finite number; None if it is none."""
    found = number(value)
    return None if found is None or not math.isfinite(found) else found


def inside(folder: Path, name: Any) -> Path | None:
    """Return the path of a file that a line names, or None if it is not within the folder."""
    if isinstance(name, str):
        with suppress(OSError, ValueError):
            path = (folder / name).resolve()
            return path if folder.resolve() in path.parents else None
    return None


def is_run(folder: Path) -> bool:
    """Whether a run has written into the folder."""
    return any((folder / name).is_file() for name in (MARK, METRICS, SUMMARY))


def started(process: int) -> str | None:
    """Return when a process of this machine started, in ticks of its clock, or None if it does not exist or is unknown.

    It distinguishes a process from a later one of the same number.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
