"""Entry points of the installed distributions, read however broken one of them is: what cannot be read is a `Problem`."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import importlib_metadata

from hocket.plugins.errors import said

#: Entry points of hundreds of plug-ins take a few kilobytes.
_LARGEST = 1_000_000
_FILE = "entry_points.txt"
#: Begins the text of a problem that ends other programs, too, torch's search for backends among them …
UNREADABLE = f"its {_FILE} cannot be read"
#: … unless this variable is 0.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Point(NamedTuple):
    """One line of an ``entry_points.txt``."""

    group: str
    name: str
    value: str


class Problem(NamedTuple):
    """What is wrong with a distribution, and what to do about it."""

    dist: str
    version: str
    text: str


class Declared(NamedTuple):
    """A distribution with entry points of ``hocket.*`` groups."""

    dist: str
    version: str
    points: list[Point]
    #: What is wrong with its metadata, or empty.
    damage: str


def parse(text: str) -> tuple[list[Point], list[str]]:
    """Return the entry points of ``hocket.*`` groups, and the lines of those groups that are none, in words."""
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
    """Look at every distribution on the path once. Of several with one name the first on the path counts, as for imports."""
    found: dict[str, Declared] = {}
    places: dict[str, str] = {}
    problems = []
    for dist, trouble in _distributions():
        if dist is None:
            problems.append(Problem("", "", trouble))
            continue
        stem, version = _stem(dist)
        if stem.startswith("~"):  # what pip leaves when it is interrupted
            continue
        try:
            text = _read(dist)
            points, wrong = parse(text) if "hocket." in text else ([], [])
        except Exception as error:
            problems.append(Problem(stem, version, f"{UNREADABLE}: {said(error)}. Install it again"))
            continue
        if not points and not wrong and normal(stem) not in found:
            found[normal(stem)] = Declared(stem, version, [], "")  # one further down the path does not count
            continue
        name, version, damage = _identity(dist, stem, version)
        problems += [Problem(name, version, each) for each in wrong]
        declared = Declared(name, version, points, damage)
        first = found.setdefault(normal(name), declared)
        if first is declared:
            places[normal(name)] = _place(dist)
        elif points and (first.version, sorted(first.points)) != (version, sorted(points)):
            chosen, other = (first, declared) if not _is_core(declared) or _is_core(first) else (declared, first)
            found[normal(name)] = chosen
            problems.append(
                Problem(
                    name,
                    other.version,
                    f"installed twice: {first.version} in {places.get(normal(name), 'a place before')} and {version} in "
                    f"{_place(dist)}. {chosen.version} counts; uninstall the other",
                )
            )
    return list(found.values()), problems


def normal(dist: str) -> str:
    """Return a distribution's name as it is compared: ``Acme_Things`` and ``acme-things`` are one."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def _distributions() -> Iterator[tuple[Any, str]]:
    """Every distribution that an import finder knows, or None and what one of the finders raised."""
    context = importlib_metadata.DistributionFinder.Context()  # type: ignore[no-untyped-call]
    for finder in sys.meta_path:
        try:
            find = getattr(finder, "find_distributions", None)
            for dist in find(context) if find is not None else ():
                yield dist, ""
        except Exception as error:
            yield (
                None,
                f"the import finder {finder!r} cannot list distributions: {said(error)}. Uninstall what brings it",
            )


def _read(dist: Any) -> str:
    """The entry points, empty if there are none. Raises OSError for what is no file, UnicodeDecodeError for what is no text."""
    folder = getattr(dist, "_path", None)
    if isinstance(folder, Path):
        try:
            file = os.stat(os.path.join(folder, _FILE))
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(os.path.join(folder, _FILE)):
                raise OSError("it is a link to nothing") from None
            return ""
        if not stat.S_ISREG(file.st_mode):
            raise OSError("it is not a file")
        if file.st_size > _LARGEST:
            raise OSError(f"it has {file.st_size:,} bytes, and at most {_LARGEST:,} are read")
        return Path(folder, _FILE).read_text(encoding="utf-8")
    return dist.read_text(_FILE) or ""


def _stem(dist: Any) -> tuple[str, str]:
    """Name and version by the folder of the metadata, which costs no reading."""
    folder = _printable(os.path.basename(str(getattr(dist, "_path", ""))))
    stem = re.sub(r"\.(dist|egg)-info$", "", folder)
    if stem == folder:
        try:
            return str(dist.metadata["Name"]), str(dist.version)
        except Exception:
            return "unknown", "unknown"
    name, _, version = stem.partition("-")
    return name.replace("_", "-"), re.sub(r"-py\d.*", "", version) or "unknown"


def _identity(dist: Any, stem: str, version: str) -> tuple[str, str, str]:
    """Name, version and what is wrong with them, by the metadata; what these do not say, the folder's name has to."""
    try:
        metadata = dist.metadata
        given = {key: metadata[key] for key in ("Name", "Version")} if metadata is not None else {}
    except Exception as error:
        return stem, version, f"its metadata cannot be read: {said(error)}. Install it again"
    missing = [key for key in ("Name", "Version") if not given.get(key)]
    damage = f"its METADATA has no {' and no '.join(missing)}. Install it again" if missing else ""
    return _printable(given.get("Name") or stem), _printable(given.get("Version") or version), damage


def _is_core(declared: Declared) -> bool:
    """Whether this is what core is made of, and not a leftover by its name."""
    return any(point.group == "hocket.v1.actions" and point.name == "default" for point in declared.points)


def _place(dist: Any) -> str:
    return _printable(os.path.dirname(str(getattr(dist, "_path", "")))) or "an unknown place"


def _printable(text: str) -> str:
    """Text that every terminal takes: file names may hold anything."""
    return text.encode("utf-8", "backslashreplace").decode().strip()
