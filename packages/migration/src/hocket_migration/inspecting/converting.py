"""Move the imports of a project to the drop-in namespaces; everything else stays as it is, to the character."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib
import json
import shutil
from pathlib import Path

from hocket_migration.inspecting import project
from hocket_migration.inspecting.names import Module, Symbol, framework_of, member_of_module
from hocket_migration.inspecting.project import Finding, Inspection
from hocket_migration.inspecting.reading import SourceFile, read
from hocket_migration.inspecting.tables import Source
from hocket_migration.inspecting.walking import Reference, Walker


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace the text from one place to another; lines from 1, columns in characters."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


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
                new = "".join(lines).splitlines(keepends=True)
                parts += difflib.unified_diff(file.lines, new, file.name, file.name, n=0)
        return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)

    def write(self, folder: str | None) -> None:
        """Write the project to a new folder, or change the files in place.

        Raises FileExistsError if the folder is not empty.
        """
        if folder is not None:
            target = Path(folder)
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise FileExistsError(f"--out {folder} is not an empty folder. Choose another, or remove it.")
            if self.root.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".git", "*.pyc")
                inside = target.resolve().is_relative_to(self.root.resolve())
                if inside:
                    raise FileExistsError(f"--out {folder} is inside {self.root}. Choose a folder beside it.")
                shutil.copytree(self.root, target, ignore=ignored, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root, target / self.root.name)
        for file in self.files:
            if (lines := self.changed.get(file.name)) is not None:
                path = file.path if folder is None else Path(folder) / file.name
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
    changed: dict[str, list[str]] = {}
    moved: set[tuple[str, int]] = set()
    for file, walker in project.walkers(files):
        walker.walk()
        if edits := _Mover(file, walker).edits():
            changed[file.name] = _apply(file.lines, edits)
            moved |= {(file.name, edit.start[0]) for edit in edits}
    left = tuple(each for each in inspection.findings if each.verdict in ("no counterpart", "not readable"))
    left += tuple(
        each for each in inspection.findings if each.source == "Accelerate" and each.verdict not in ("no counterpart",)
    )
    return Conversion(Path(path), tuple(files), changed, tuple(sorted(left, key=_order)), inspection)


def _order(finding: Finding) -> tuple[str, int, int, int]:
    return finding.file, finding.cell or 0, finding.line, finding.column


def offered(source: Source, dotted: str, name: str) -> str | None:
    """Return the module of the drop-in namespace that offers ``name`` of the module ``dotted``, or None.

    The namespace itself is tried first, then its modules at the same place, such as ``hocket_migration.composer.algorithms``.
    """
    if not source.namespace:
        return None
    inner = dotted.split(".")[1:]
    for count in range(len(inner) + 1):
        target = ".".join([source.namespace, *inner[:count]])
        with contextlib.suppress(ImportError):
            if name in dir(importlib.import_module(target)):
                return target
    return None


class _Mover:
    """Find the edits of a file."""

    def __init__(self, file: SourceFile, walker: Walker) -> None:
        self.file, self.walker = file, walker
        self._edits: list[Edit] = []

    def edits(self) -> list[Edit]:
        """Return the edits, which do not overlap."""
        through: dict[str, list[Reference]] = {}
        for reference in self.walker.references:
            through.setdefault(reference.through, []).append(reference)
        for node in ast.walk(self.file.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                source = framework_of(node.module)
                if source is not None and node.module not in self.walker.names.modules:
                    self._move_from(node, source)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    source = framework_of(alias.name)
                    if source is not None and alias.name.partition(".")[0] not in self.walker.names.modules:
                        bound = alias.asname or alias.name.partition(".")[0]
                        self._move_module(node, alias, source, through.pop(bound, []))
        return self._edits

    def _move_from(self, node: ast.ImportFrom, source: Source) -> None:
        assert node.module is not None
        targets: dict[str, list[ast.alias]] = {}
        stay: list[ast.alias] = []
        for alias in node.names:
            found = member_of_module(Module(source, node.module), alias.name)
            target = offered(source, node.module, alias.name) if isinstance(found, Symbol) else None
            (stay if target is None else targets.setdefault(target, [])).append(alias)
        if not targets:
            return
        if not stay and len(targets) == 1:
            self._replace_module(node, next(iter(targets)))
            return
        if any(self._line(number).endswith("\\") for number in range(node.lineno, (node.end_lineno or 0) + 1)):
            text = f"{self._statements(targets, node)}{self._end(node)}" if stay else self._statements(targets, node)
            names = ", ".join(ast.unparse(alias) for alias in stay)
            self._edit_statement(node, f"{text}from {node.module} import {names}" if stay else text)
            return
        for aliases in targets.values():
            for alias in aliases:
                self._remove(node, alias)
        if not stay:  # all aliases go to several modules: the first replaces the statement
            self._edits = [each for each in self._edits if not _inside(each, node)]
            text = self._statements(targets, node)
            self._edit_statement(node, text)
            return
        self._insert_before(node, self._statements(targets, node))

    def _statements(self, targets: dict[str, list[ast.alias]], node: ast.stmt) -> str:
        return self._end(node).join(
            f"from {target} import {', '.join(ast.unparse(alias) for alias in aliases)}"
            for target, aliases in sorted(targets.items())
        )

    def _insert_before(self, node: ast.stmt, text: str) -> None:
        place = (node.lineno, node.col_offset)
        self._edit(place, place, f"{text}{self._end(node)}")

    def _replace_module(self, node: ast.ImportFrom, target: str) -> None:
        line = self._line(node.lineno)
        assert node.module is not None
        start = line.find(node.module, self._column(node.lineno, node.col_offset))
        if start < 0:  # the name is on another line, after a backslash
            self._edit_statement(node, ast.unparse(node).replace(f"from {node.module} ", f"from {target} ", 1))
            return
        self._edits.append(Edit((node.lineno, start), (node.lineno, start + len(node.module)), target))

    def _edit_statement(self, node: ast.stmt, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        self._edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)

    def _remove(self, node: ast.ImportFrom, alias: ast.alias) -> None:
        """Remove a name from a statement, with its comma, and its line if nothing else is in it."""
        assert alias.end_lineno is not None and alias.end_col_offset is not None
        line = self._line(alias.lineno)
        start, end = self._column(alias.lineno, alias.col_offset), self._column(alias.end_lineno, alias.end_col_offset)
        rest = line[end:]
        after = len(rest) - len(rest.lstrip())
        if rest.lstrip().startswith(","):
            end += after + 1
            end += len(line[end:]) - len(line[end:].lstrip(" \t"))
            alone = not line[:start].strip() and line[end:].lstrip()[:1] in ("", "#")
            if alone:
                self._edits.append(Edit((alias.lineno, 0), (alias.lineno, len(line)), ""))
                return
        else:  # the last name: its comma is before it
            before = line[:start].rstrip()
            if before.endswith(","):
                start = len(before) - 1
            elif not before and alias is node.names[-1]:
                self._remove_last_on_its_line(alias, line, end)
                return
        self._edits.append(Edit((alias.lineno, start), (alias.lineno, end), ""))

    def _remove_last_on_its_line(self, alias: ast.alias, line: str, end: int) -> None:
        closing = line[end:].strip()
        if closing.startswith(")"):
            self._edits.append(Edit((alias.lineno, 0), (alias.lineno, end), ""))
        else:
            self._edits.append(Edit((alias.lineno, 0), (alias.lineno, len(line)), ""))

    def _move_module(self, node: ast.Import, alias: ast.alias, source: Source, uses: list[Reference]) -> None:
        """Move ``import module``: replaced if all its uses are offered, else each use that is goes to the namespace itself."""
        found = [(each, offered(source, each.symbol.dotted, each.symbol.name)) for each in uses]
        targets = {target for _, target in found if target is not None}
        if not targets:
            return
        whole = all(target is not None for _, target in found) and not source.others_stay
        if whole and alias.asname and len(targets) == 1 and len(node.names) == 1:
            assert alias.end_col_offset is not None
            column = self._column(alias.lineno, alias.col_offset)
            self._edits.append(Edit((alias.lineno, column), (alias.lineno, column + len(alias.name)), targets.pop()))
            return
        self._insert_before(node, self._end(node).join(f"import {target}" for target in sorted(targets)))
        for reference, target in found:
            if target is not None:
                self._edit_reference(reference, target)

    def _edit_reference(self, reference: Reference, target: str) -> None:
        node = reference.node
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if node.lineno == node.end_lineno:
            self._edit(start, end, f"{target}.{node.attr}")
        else:  # a chain of several lines, in parentheses
            inner = node.value
            assert inner.end_lineno is not None and inner.end_col_offset is not None
            self._edit(start, (inner.end_lineno, inner.end_col_offset), target)

    # --- places

    def _line(self, number: int) -> str:
        return self.file.lines[number - 1].rstrip("\r\n")

    def _column(self, line: int, offset: int) -> int:
        """Return the column in characters of a column in bytes, as syntax trees have them."""
        return len(self._line(line).encode()[:offset].decode(errors="ignore"))

    def _edit(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        self._edits.append(Edit((start[0], self._column(*start)), (end[0], self._column(*end)), text))

    def _indent(self, node: ast.stmt) -> str:
        line = self._line(node.lineno)
        return line[: len(line) - len(line.lstrip())]

    def _end(self, node: ast.stmt) -> str:
        """Return what separates a new statement from the statement that it is inserted before."""
        return f"\n{self._indent(node)}" if self._begins_line(node) else "; "

    def _begins_line(self, node: ast.stmt) -> bool:
        return not self._line(node.lineno)[: self._column(node.lineno, node.col_offset)].strip()


def _inside(edit: Edit, node: ast.stmt) -> bool:
    return node.lineno <= edit.start[0] <= (node.end_lineno or node.lineno)


def _apply(lines: list[str], edits: list[Edit]) -> list[str]:
    """Return the lines with the edits; an insertion is in the line where it is, and a line may become empty."""
    new = list(lines)
    for edit in sorted(edits, key=lambda each: (each.start, each.end), reverse=True):
        first, last = edit.start[0] - 1, edit.end[0] - 1
        ending = "\r\n" if new[first].endswith("\r\n") else "\n"
        head, tail = new[first][: edit.start[1]], new[last][edit.end[1] :]
        text = edit.text.replace("\n", ending)
        merged = f"{head}{text}{tail}"
        new[first : last + 1] = [merged if merged.strip() else "", *([""] * (last - first))]
    return new


def _write(path: Path, file: SourceFile, lines: list[str]) -> None:
    if file.notebook is None:
        path.write_bytes("".join(lines).encode(file.encoding))
        return
    bounds = [*sorted(file.cells.items(), key=lambda item: item[1])]
    for index, (number, first) in enumerate(bounds):
        last = bounds[index + 1][1] - 1 if index + 1 < len(bounds) else len(lines)
        text = "".join(lines[first - 1 : last]).removesuffix("\n")
        cell = file.notebook["cells"][number - 1]
        cell["source"] = text if isinstance(cell["source"], str) else text.splitlines(keepends=True)
    path.write_text(json.dumps(file.notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
