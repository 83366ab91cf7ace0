"""Names and formats of the files in a run's folder, and how to read them when they are incomplete or not ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.basics import safe_files

#: Files and folders within a run's folder: who owns it, what was logged, state and plan, images and tables, configuration.
MARK, METRICS, SUMMARY, MEDIA, CONFIG = "run.json", "metrics.jsonl", "summary.json", "media", "config.yaml"
#: The record of a sweep, in the folder above those of its trials.
SWEEP = "sweep.json"
#: The keys of a line of metrics that are a position.
POSITION = ("epoch", "batch", "sample", "token", "seconds")


def strict(value: object) -> Any:
    """Replace non-finite floats by strings and convert containers to JSON types. Objects of other types are unchanged."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [strict(item) for item in value]
    return value


def parsed(line: bytes | str) -> dict[str, Any]:
    """Return the JSON object of a line; an empty dict if it is none, such as half a line of a killed run."""
    try:
        value = safe_files.parsed(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def objects(path: Path, within: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, and skip malformed lines. An unreadable file yields nothing.

    Links out of ``within`` are not followed; it is the file's folder unless given.
    """
    return filter(None, lines(path, within))


def lines(path: Path, within: Path | None = None) -> Iterator[dict[str, Any]]:
    """Parse each line of a JSON Lines file. Yield an empty dict for a malformed line, and skip a truncated last line."""
    with suppress(OSError):
        for rows in blocks(path, within):
            yield from rows


def blocks(path: Path, within: Path | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield many lines at a time, as :func:`lines` does. Raises OSError, also for a line that is too long."""
    for block, complete in safe_files.blocks(path, within or path.parent):
        raw, rows = b",".join(block), []
        if b"[" not in raw and raw.count(b"{") == len(block):  # flat objects, which are parsed faster together
            with suppress(ValueError):
                rows = json.loads(b"[%b]" % raw)
        if len(rows) != len(block) or set(map(type, rows)) != {dict}:
            rows = [parsed(line) for line in block]
        yield rows if complete else [*filter(None, rows)]


def content(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Return the JSON object of a file; an empty dict if it cannot be read, or is a link out of ``within``, its folder."""
    with suppress(OSError):
        return parsed(safe_files.content(path, within=within or path.parent))
    return {}


def size(path: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def number(value: object) -> float | None:
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


def finite(value: object) -> float | None:
    """Return a value as a finite number; None if it is none."""
    given = number(value)
    return None if given is None or not math.isfinite(given) else given


def inside(folder: Path, name: object) -> Path | None:
    """Return the path of a file that a line names, or None if it is not within the folder."""
    if isinstance(name, str):
        with suppress(OSError, ValueError):
            path = (folder / name).resolve()
            return path if folder.resolve() in path.parents else None
    return None


def started(process: int) -> str | None:
    """Return when a process of this machine started, in ticks of its clock, or None if it does not exist or is unknown.

    It distinguishes a process from a later one of the same number.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
