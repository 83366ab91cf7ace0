"""Fail unless sdists and wheels hold what they should, and nothing else of the machine that built them."""

from __future__ import annotations

import configparser
import tarfile
from email import message_from_bytes
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

#: What stands beside ``src`` in an sdist; hatchling adds ``.gitignore``, which a build from the sdist follows.
BESIDE_SOURCES = {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", ".gitignore"}
SUFFIXES = {".py", ".pyi", ".typed", ".toml", ".css", ".js", ".md", ".txt"}
METADATA = (
    "Summary", "Description-Content-Type", "Author", "License-Expression", "Keywords", "Classifier", "Project-URL",
    "Requires-Python",
)  # fmt: skip


def check(file: Path, license_text: bytes, machine: list[str]) -> list[str]:
    """Return the problems of an sdist or a wheel; `machine` are paths that no file in it may mention."""
    files = _contents(file)
    if file.suffix == ".whl":
        info = next(name.split("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
        metadata, license_file = f"{info}/METADATA", f"{info}/licenses/LICENSE"
        sources = {name for name in files if not name.startswith(f"{info}/")}
        problems = _absent_targets(files.get(f"{info}/entry_points.txt", b"").decode(), sources)
    else:
        metadata, license_file = "PKG-INFO", "LICENSE"
        sources = {name.removeprefix("src/") for name in files.keys() - BESIDE_SOURCES}
        problems = []
    for name in sorted(sources):
        path = PurePosixPath(name)
        if path.suffix not in SUFFIXES or (path.suffix == ".py" and path.name.startswith(("test_", "conftest"))):
            problems.append(f"{name} is no source of a package")
    tops = {name.split("/")[0] for name in sources}
    if len(tops) != 1 or f"{min(tops)}/py.typed" not in sources:
        problems.append(f"expected one typed package, found {sorted(tops)}")
    if files.get(license_file) != license_text:
        problems.append("its LICENSE differs from the repository's")
    fields = message_from_bytes(files[metadata])
    problems += [f"its metadata has no {field}" for field in METADATA if field not in fields]
    problems += [f"{name} mentions {path}" for name, data in files.items() for path in machine if path.encode() in data]
    return [f"{file.name}: {problem}" for problem in problems]


def _contents(file: Path) -> dict[str, bytes]:
    """The files of a wheel, or of an sdist without its top folder, by name."""
    if file.suffix == ".whl":
        with ZipFile(file) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(file) as sdist:
        opened = {member.name.partition("/")[2]: sdist.extractfile(member) for member in sdist}
        return {name: data.read() for name, data in opened.items() if data}


def _absent_targets(entry_points: str, sources: set[str]) -> list[str]:
    declared = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    declared.optionxform = str  # type: ignore[assignment, method-assign]
    declared.read_string(entry_points)
    problems, top = [], min(sources).split("/")[0]
    for group in declared.sections():
        for name, target in declared.items(group):
            path = target.split(":")[0].replace(".", "/")
            if path.startswith(f"{top}/") and not {f"{path}.py", f"{path}/__init__.py"} & sources:
                problems.append(f"{group} {name} = {target}, but there is no such module in the wheel")
    return problems
