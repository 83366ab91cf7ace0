"""What a wheel says about itself, without importing or installing it."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name
from packaging.version import Version

from hocket.errors import WrongFile
from hocket.plugins import KINDS, entry_points
from hocket_cli.compatibility import of_core

#: Maximum size in bytes of each file of metadata.
_MAX_BYTES = 1_000_000


class Plugin(NamedTuple):
    """A plug-in that a distribution declares."""

    kind: str
    name: str
    #: The contract versions that it is declared for, such as ``("v1", "v2")``.
    apis: tuple[str, ...]


@dataclass(frozen=True)
class About:
    """A distribution, as its metadata describes it. Anything may stand there: escape it before it is shown."""

    name: str
    version: str
    summary: str
    author: str
    #: The versions of hocket that it requires, such as ``>=0.1,<0.2``.
    requires: str
    plugins: tuple[Plugin, ...]


def of_wheel(file: Path | bytes) -> About:
    """Return what a wheel says. Raises WrongFile if it is not a wheel, or its metadata are too large."""
    source: IO[bytes] | Path = file if isinstance(file, Path) else io.BytesIO(file)
    try:
        with zipfile.ZipFile(source) as archive:
            return _about(archive.namelist(), lambda name: _read(archive, name))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        where = file if isinstance(file, Path) else "a downloaded file"
        raise WrongFile(f"{where} is not a wheel that can be read: {error}. Build it again.") from error


def of_folder(folder: Path) -> list[About]:
    """Return what the distributions say that are installed in a folder, with or without plug-ins."""
    return [
        _about([each.relative_to(info.parent).as_posix() for each in info.iterdir()], _reader(info.parent))
        for info in sorted(folder.glob("*.dist-info"))
    ]


def _reader(folder: Path) -> Callable[[str], bytes]:
    return lambda name: (folder / name).read_bytes()


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as opened:
        data = opened.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{name} has more than {_MAX_BYTES:,} bytes")
    return data


def _about(names: Iterable[str], read: Callable[[str], bytes]) -> About:
    files = {match[1]: name for name in names if (match := re.fullmatch(r"[^/]+\.dist-info/(\w+(?:\.txt)?)", name))}
    if "METADATA" not in files:
        raise ValueError("it has no METADATA")
    raw, _ = parse_email(read(files["METADATA"]))
    if not raw.get("name") or not raw.get("version"):
        raise ValueError("its METADATA has no name or no version")
    points: list[entry_points.Point] = []
    if "entry_points.txt" in files:
        points, _ = entry_points.parse(read(files["entry_points.txt"]).decode())
    apis: dict[tuple[str, str], list[str]] = {}
    for group, name, _ in points:
        match = re.fullmatch(r"hocket\.(v[0-9]+)\.(\w+)", group)
        if match and match[2] in KINDS:
            apis.setdefault((match[2], name), []).append(match[1])
    author = raw.get("author") or raw.get("author_email") or raw.get("maintainer") or raw.get("maintainer_email") or ""
    return About(
        canonicalize_name(raw["name"], validate=True), str(Version(raw["version"])), " ".join(raw.get("summary", "").split()),
        " ".join(author.split()),  # in one line: a second one could look like hocket's own words
        of_core(raw.get("requires_dist", [])),
        tuple(Plugin(kind, name, tuple(each)) for (kind, name), each in sorted(apis.items())),
    )  # fmt: skip


def newest(found: Iterable[About]) -> list[About]:
    """Return the newest version of each distribution that has plug-ins, by name."""
    versions: dict[str, About] = {}
    for each in sorted((each for each in found if each.plugins), key=lambda each: Version(each.version)):
        versions[each.name] = each
    return sorted(versions.values(), key=lambda each: each.name)
