"""Read the entry points of the installed distributions. A broken distribution yields a `Problem`, never an exception."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hocket.basics.plugin_errors import summarize

if TYPE_CHECKING:
    from importlib.metadata import Distribution

#: Maximum size of an ``entry_points.txt`` in bytes. Entry points of hundreds of plug-ins take a few kilobytes.
_MAX_BYTES = 1_000_000
_FILE = "entry_points.txt"
#: Prefix of the text of a problem that also crashes other programs, among them torch's search for backends …
UNREADABLE = f"its {_FILE} cannot be read"
#: … unless this environment variable is 0.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Point(NamedTuple):
    """One line of an ``entry_points.txt``."""

    group: str
    name: str
    value: str


class Problem(NamedTuple):
    """A problem of a distribution, and how to fix it."""

    dist: str
    version: str
    text: str


class Declared(NamedTuple):
    """A distribution with entry points of ``hocket.*`` groups."""

    dist: str
    version: str
    points: list[Point]
    #: The problem with its metadata, or empty.
    damage: str


def parse(text: str) -> tuple[list[Point], list[str]]:
    """Return the entry points of ``hocket.*`` groups, and a message for each malformed line in those groups."""
    points, wrong = [], []
    group = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[" and line[-1] == "]":
            group = line[1:-1].strip()
        elif group.startswith("hocket."):
            name, _, value = (part.strip() for part in line.partition("="))
            if name and value:
                points.append(Point(group, name, value))
            else:
                wrong.append(f"line {number} of its {_FILE} is {line!r} and not `name = module:Class`; correct it")
    return points, wrong


def scan() -> tuple[list[Declared], list[Problem]]:
    """Scan every distribution on the path once. Of several with one name the first on the path counts, as for imports."""
    by_name: dict[str, Declared] = {}
    places: dict[str, str] = {}
    problems = []
    for dist, trouble in _distributions():
        if dist is None:
            problems.append(Problem("", "", trouble))
            continue
        stem, version = _stem(dist)
        if stem.startswith("~"):  # left over from an interrupted pip
            continue
        try:
            text = _read(dist)
            points, wrong = parse(text) if "hocket." in text else ([], [])
        except Exception as error:
            problems.append(Problem(stem, version, f"{UNREADABLE}: {summarize(error)}. Install it again"))
            continue
        if not points and not wrong and normal(stem) not in by_name:
            by_name[normal(stem)] = Declared(stem, version, [], "")  # shadows a later one on the path
            continue
        name, version, damage = _identity(dist, stem, version)
        problems += [Problem(name, version, problem) for problem in wrong]
        declared = Declared(name, version, points, damage)
        first = by_name.setdefault(normal(name), declared)
        if first is declared:
            places[normal(name)] = _place(dist)
        elif points and (first.version, sorted(first.points)) != (version, sorted(points)):
            chosen, other = (first, declared) if not _is_core(declared) or _is_core(first) else (declared, first)
            by_name[normal(name)] = chosen
            problems.append(
                Problem(
                    name,
                    other.version,
                    f"installed twice: {first.version} in {places.get(normal(name), 'an earlier place')} and {version} in "
                    f"{_place(dist)}. {chosen.version} is used; uninstall the other",
                )
            )
    return list(by_name.values()), problems


def normal(dist: str) -> str:
    """Return the normalized name of a distribution: ``Acme_Things`` becomes ``acme-things``."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def _distributions() -> Iterator[tuple[Distribution | None, str]]:
    """Yield every distribution of the import finders with ""; for a finder that raises, None and a message."""
    import importlib_metadata

    context = importlib_metadata.DistributionFinder.Context()  # type: ignore[no-untyped-call]
    for finder in sys.meta_path:
        try:
            find = getattr(finder, "find_distributions", None)
            for dist in find(context) if find is not None else ():
                yield dist, ""
        except Exception as error:
            yield (
                None,
                f"the import finder {finder!r} cannot list distributions: {summarize(error)}. Uninstall its package",
            )


def _read(dist: Distribution) -> str:
    """Return the text of ``entry_points.txt``, or empty if there is none.

    Raises OSError if it is not a regular file, UnicodeDecodeError if it is not UTF-8.
    """
    folder = getattr(dist, "_path", None)
    if isinstance(folder, Path):
        try:
            file = os.stat(os.path.join(folder, _FILE))
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(os.path.join(folder, _FILE)):
                raise OSError("it is a broken link") from None
            return ""
        if not stat.S_ISREG(file.st_mode):
            raise OSError("it is not a file")
        if file.st_size > _MAX_BYTES:
            raise OSError(f"it has {file.st_size:,} bytes, and at most {_MAX_BYTES:,} are read")
        return Path(folder, _FILE).read_text(encoding="utf-8")
    return dist.read_text(_FILE) or ""


def _stem(dist: Distribution) -> tuple[str, str]:
    """Return name and version from the name of the metadata folder, without reading a file."""
    folder = _printable(os.path.basename(str(getattr(dist, "_path", ""))))
    stem = re.sub(r"\.(dist|egg)-info$", "", folder)
    if stem == folder:
        try:
            return str(dist.metadata["Name"]), str(dist.version)
        except Exception:
            return "unknown", "unknown"
    name, _, version = stem.partition("-")
    return name.replace("_", "-"), re.sub(r"-py\d.*", "", version) or "unknown"


def _identity(dist: Distribution, stem: str, version: str) -> tuple[str, str, str]:
    """Return name, version and their problem (or empty) from the metadata, falling back to the name of the folder."""
    try:
        metadata = dist.metadata
        given = {key: metadata[key] for key in ("Name", "Version")} if metadata is not None else {}
    except Exception as error:
        return stem, version, f"its metadata cannot be read: {summarize(error)}. Install it again"
    missing = [key for key in ("Name", "Version") if not given.get(key)]
    damage = f"its METADATA has no {' and no '.join(missing)}. Install it again" if missing else ""
    return _printable(given.get("Name") or stem), _printable(given.get("Version") or version), damage


def _is_core(declared: Declared) -> bool:
    """Whether this distribution is core itself, and not a leftover of the same name."""
    return any(point.group == "hocket.v1.actions" and point.name == "default" for point in declared.points)


def _place(dist: Distribution) -> str:
    return _printable(os.path.dirname(str(getattr(dist, "_path", "")))) or "an unknown place"


def _printable(text: str) -> str:
    """Escape characters that cannot be encoded: file names may contain any bytes."""
    return text.encode("utf-8", "backslashreplace").decode().strip()
