"""Move the imports of a project to the drop-in namespaces; everything else stays as it is, to the character."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import os
import shutil
import stat
from pathlib import Path

from hocket.basics.safe_files import replacing
from hocket.errors import ExistingFile
from hocket_migration.inspecting import project
from hocket_migration.inspecting.moving import Mover, apply
from hocket_migration.inspecting.names import framework_of
from hocket_migration.inspecting.project import Finding, Inspection
from hocket_migration.inspecting.reading import SourceFile, lines_of, omitted, read


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The converted files of a project."""

    root: Path
    files: tuple[SourceFile, ...]
    #: The new lines of files that change, by name. Inserted lines are part of the line that they are in.
    changed: dict[str, list[str]]
    #: Findings that changing imports does not settle.
    left: tuple[Finding, ...]
    inspection: Inspection

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        parts: list[str] = []
        for file in self.files:
            if (lines := self.changed.get(file.name)) is not None:
                new = lines_of("".join(lines))
                parts += difflib.unified_diff(file.lines, new, file.name, file.name, n=0)
        return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)

    def write(self, folder: str | None) -> None:
        """Write the project to a new folder, or change the files in place. Links are kept as links.

        Caches, hidden folders and virtual environments are not copied.

        Raises FileExistsError if the folder is not empty.
        """
        if folder is not None:
            target = Path(folder)
            for parent in (target, *target.parents):
                if parent.exists() and not (parent.is_dir() and os.access(parent, os.W_OK)):
                    raise OSError(
                        f"--out {folder} cannot be written: {parent} is not a folder that this user may write to."
                    )
                if parent.exists():
                    break
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise ExistingFile(f"--out {folder} is not an empty folder. Choose another, or remove it.")
            if self.root.is_dir():
                inside = target.resolve().is_relative_to(self.root.resolve())
                if inside:
                    raise ExistingFile(f"--out {folder} is inside {self.root}. Choose a folder beside it.")
                shutil.copytree(self.root, target, symlinks=True, ignore=_omitted, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root, target / self.root.name)
        for file in self.files:
            if (lines := self.changed.get(file.name)) is not None:
                path = file.path.resolve() if folder is None else Path(folder) / file.name
                _write(path, file, lines)


def convert(path: str | Path) -> Conversion:
    """Return the project at ``path`` with the imports of names that a drop-in namespace offers changed to it.

    Example:
        >>> import pathlib
        >>> from hocket_migration.inspecting.converting import convert
        >>> _ = pathlib.Path("script.py").write_text("from transformers import AutoTokenizer, Trainer  # both\\n")
        >>> print("".join(convert("script.py").changed["script.py"]), end="")
        from hocket_migration.transformers import Trainer
        from transformers import AutoTokenizer  # both
    """
    files, _ = read(path)
    inspection = project.inspect(path)
    followed = project.walkers(files)
    taken = {
        alias.name
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom) and (node.level or framework_of(node.module or "") is None)
        for alias in node.names
    }
    changed: dict[str, list[str]] = {}
    left = [
        each
        for each in inspection.findings
        if each.verdict in ("no counterpart", "not readable") or each.source == "Accelerate"
    ]
    known = {(each.place, each.name) for each in left}
    for file, walker in followed:
        walker.walk()
        mover = Mover(file, walker, taken)
        mover.move()
        if mover.edits:
            changed[file.name] = apply(file.lines, mover.edits)
        findings = [project.finding(file, use) for use in dict.fromkeys(mover.left)]
        left += [each for each in findings if (each.place, each.name) not in known]
    return Conversion(Path(path), tuple(files), changed, tuple(sorted(left, key=_order)), inspection)


def _omitted(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if omitted(Path(folder) / name)}


def _order(finding: Finding) -> tuple[str, int, int, int]:
    return finding.file, finding.cell or 0, finding.line, finding.column


def _write(path: Path, file: SourceFile, lines: list[str]) -> None:
    """Replace a file. Another name that it has elsewhere, a hard link, keeps what it had."""
    with replacing(path, stat.S_IMODE(path.stat().st_mode)) as opened:
        opened.write(_content(file, lines))


def _content(file: SourceFile, lines: list[str]) -> bytes:
    if file.notebook is None:
        return "".join(lines).encode(file.encoding)
    bounds = [*sorted(file.cells.items(), key=lambda item: item[1])]
    for index, (number, first) in enumerate(bounds):
        last = bounds[index + 1][1] - 1 if index + 1 < len(bounds) else len(lines)
        text = "".join(lines[first - 1 : last]).removesuffix("\n")
        cell = file.notebook["cells"][number - 1]
        cell["source"] = text if isinstance(cell["source"], str) else lines_of(text)
    return (json.dumps(file.notebook, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
