"""Inspect a project: every use of a framework, and what becomes of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket_migration.inspecting.names import Names
from hocket_migration.inspecting.reading import Problem, SourceFile, read
from hocket_migration.inspecting.tables import Verdict
from hocket_migration.inspecting.uses import Use
from hocket_migration.inspecting.walking import Walker

#: Rounds over all files after which nothing more is learned; each follows names through one more call or file.
_ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Finding:
    """A use of a framework in a line. ``cell`` is the number of the cell of a notebook, ``line`` is then counted in it."""

    file: str
    line: int
    column: int
    source: str
    name: str
    verdict: Verdict
    text: str
    cell: int | None = None
    #: Whether the drop-in namespace does not have it, or refuses it.
    breaks: bool = False

    @property
    def place(self) -> str:
        """The place as text."""
        return f"{self.file}:{self.line}" if self.cell is None else f"{self.file}:cell {self.cell}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect` found, in the order of files and lines."""

    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]
    #: The number of files that were read.
    files: int

    def counts(self) -> dict[str, int]:
        """Return the number of findings by verdict."""
        counted = Counter(finding.verdict for finding in self.findings)
        verdicts: tuple[Verdict, ...] = ("maps", "changes", "no counterpart", "not readable")
        return {verdict: counted[verdict] for verdict in verdicts}

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data."""
        return {
            "files": self.files,
            "counts": self.counts(),
            "findings": [dataclasses.asdict(each) for each in self.findings],
            "problems": [dataclasses.asdict(each) for each in self.problems],
        }


def inspect(path: str | Path) -> Inspection:
    """Read a Python file, a notebook or a folder, and say what becomes of each use of a framework. Nothing is imported.

    Example:
        >>> import pathlib
        >>> from hocket_migration.inspecting.project import inspect
        >>> _ = pathlib.Path("train.py").write_text("import lightning as L\\ntrainer = L.Trainer(max_epochs=3)\\n")
        >>> for finding in inspect("train.py").findings:
        ...     print(finding.line, finding.name, finding.verdict)
        1 import lightning maps
        2 L.Trainer maps
        2 Trainer(max_epochs=) maps
    """
    files, problems = read(path)
    findings: list[Finding] = []
    followed = walkers(files)
    for file, walker in followed:
        for use in walker.walk():
            findings.append(finding(file, use))
    deep = {file.name for file in files} - {file.name for file, _ in followed}
    problems += [Problem(name, "its expressions are nested too deeply to be followed") for name in sorted(deep)]
    return Inspection(tuple(findings), tuple(problems), len(followed))


def finding(file: SourceFile, use: Use) -> Finding:
    """Return a use of a file as a finding."""
    line, cell = file.place(use.line)
    entry = use.entry
    return Finding(
        file.name, line, use.column + 1, use.source.title, use.name, entry.verdict, entry.text, cell, use.breaks
    )


def _walks(file: SourceFile, names: Names) -> bool:
    try:
        Walker(file, names).walk()
    except RecursionError:
        return False
    return True


def walkers(files: list[SourceFile]) -> list[tuple[SourceFile, Walker]]:
    """Return a walker for each file, after the names of the project were followed.

    Files with expressions that Python's recursion limit does not allow to follow are omitted.
    """
    names = Names(files)
    files = [file for file in files if _walks(file, names)]
    for _ in range(_ROUNDS):
        before = names.learned
        for file in files:
            Walker(file, names).walk()
        if names.learned == before:
            break
    return [(file, Walker(file, names)) for file in files]
