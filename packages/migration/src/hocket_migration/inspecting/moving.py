"""Find the edits that move the imports of a file to a drop-in namespace."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import io
import itertools
import tokenize
from collections.abc import Collection, Iterable

from hocket_migration.inspecting.names import Module, Symbol, framework_of, member_of_module
from hocket_migration.inspecting.namespaces import module_at_the_place_of, offered, same_place
from hocket_migration.inspecting.reading import SourceFile
from hocket_migration.inspecting.tables import Entry, Source
from hocket_migration.inspecting.uses import Use
from hocket_migration.inspecting.walking import Reference, Walker


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace the text from one place to another; lines from 1, columns in characters."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


class Mover:
    """Find the edits of a file, which do not overlap, and the uses that no edit moves.

    Args:
        walker: one that has walked over the file.
        taken: the names that files of the project import from others, which stay.
    """

    def __init__(self, file: SourceFile, walker: Walker, taken: Collection[str]) -> None:
        self.file, self.walker, self.taken = file, walker, taken
        self.edits: list[Edit] = []
        self.left: list[Use] = []
        self._text = "".join(file.lines)
        self._starts = [0, *itertools.accumulate(len(line) for line in file.lines)]
        self._through: dict[str, list[Reference]] = {}
        self._bound: set[str] = set()
        for reference in {id(each.node): each for each in walker.references}.values():
            self._through.setdefault(reference.through, []).append(reference)

    def move(self) -> None:
        """Fill ``edits`` and ``left``."""
        for node in ast.walk(self.file.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                if (source := self._framework(node.module)) is not None and source.namespace:
                    (self._move_star if node.names[0].name == "*" else self._move_from)(node, node.module, source)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (source := self._framework(alias.name)) is not None and source.namespace:
                        self._move_import(node, alias, source)
        for name, references in self._through.items():
            for each in references if name not in self._bound else ():  # modules that came another way
                if offered(each.found) is not None and (not each.found.source.whole or same_place(each.found) is None):
                    self._leave(each.node, each.found.source, ast.unparse(each.node), "import it by name")

    def _framework(self, module: str) -> Source | None:
        local = self.walker.names.local_module(module, self.file.module)
        return framework_of(module) if local is None else None

    # --- import module

    def _move_import(self, node: ast.Import, alias: ast.alias, source: Source) -> None:
        bound = alias.asname or alias.name.partition(".")[0]
        module = Module(source, alias.name if alias.asname else bound)
        start, end = self._span(alias)
        if (place := module_at_the_place_of(module)) is not None:
            if targets := self._correct(bound):
                self._insert_before(node, [f"import {target}" for target in targets])
            self._edit(start, end, f"{place} as {bound}")
            return
        moved, targets, whole = self._references(bound)
        if not moved:
            if source.whole:
                self._leave(alias, source, f"import {alias.name}", f"{source.namespace} does not have it")
        elif whole and alias.asname and len(targets) == 1 and all(_direct(each.node) for each in moved):
            self._edit(start, end, f"{targets[0]} as {bound}")
            self._bound.add(bound)
        else:
            self._name(bound, moved)
            if whole:
                self._edit(start, end, ", ".join(targets))
            else:
                self._insert_before(node, [f"import {target}" for target in targets])

    def _correct(self, bound: str) -> list[str]:
        """Correct references through a module that moves, and return the modules that these name."""
        targets: set[str] = set()
        moved = []
        for each in self._through.get(bound, ()):
            if same_place(each.found) is None:
                target = offered(each.found) if isinstance(each.found, Symbol) else None
                if target is None:
                    self._leave_reference(each)
                else:
                    moved.append(each)
                    targets.add(target)
        self._name(bound, moved)
        self._bound.add(bound)
        return sorted(targets)

    def _references(self, bound: str) -> tuple[list[Reference], list[str], bool]:
        """Return the references that move one by one, the modules that they name then, and whether these are all uses."""
        references = self._through.get(bound, [])
        moved = [each for each in references if isinstance(each.found, Symbol) and offered(each.found) is not None]
        for each in references:
            if each not in moved and each.found.source.whole:
                self._leave_reference(each)
        whole = bound not in self.taken and len(moved) == sum(
            _mentions(bound, each) for each in ast.walk(self.file.tree)
        )
        return moved, sorted({offered(each.found) or "" for each in moved}), whole

    def _name(self, bound: str, moved: Iterable[Reference]) -> None:
        """Write the names of references through ``bound`` with their new modules, once."""
        for each in moved if bound not in self._bound else ():
            assert isinstance(each.node, ast.Attribute)
            start, end = self._span(each.node.value)  # which may be on another line than the name
            self._edit(start, end, offered(each.found) or "")
        self._bound.add(bound)

    # --- from module import names

    def _move_from(self, node: ast.ImportFrom, dotted: str, source: Source) -> None:
        targets: dict[str, list[ast.alias]] = {}
        modules: set[str] = set()
        gone: list[ast.alias] = []
        for alias in node.names:
            found = member_of_module(Module(source, dotted), alias.name)
            assert isinstance(found, Symbol | Module)
            bound = alias.asname or alias.name
            if (target := offered(found)) is not None:
                targets.setdefault(target, []).append(alias)
                modules.update(self._correct(bound) if isinstance(found, Module) else ())
                continue
            moved, named, whole = self._references(bound) if isinstance(found, Module) else ([], [], False)
            self._name(bound, moved)
            modules.update(named)
            if moved and whole:
                gone.append(alias)
            elif source.whole:
                self._leave(alias, source, f"import {alias.name}", f"{source.namespace} does not have it")
        statements = [f"import {module}" for module in sorted(modules)]
        moving = [*itertools.chain(*targets.values()), *gone]
        stay = [alias for alias in node.names if alias not in moving]
        if not stay and len(targets) == 1 and not gone:
            if statements:
                self._insert_before(node, statements)
            self._replace_module(node, dotted, next(iter(targets)))
        elif moving or statements:
            comments = self._remove(node, moving) if stay else self._comments(node)
            for target, aliases in sorted(targets.items()):
                notes = [comments.pop(each, "") for each in aliases]
                names = ", ".join(ast.unparse(alias) for alias in aliases)
                statements.append(f"from {target} import {names}{_comment(notes)}")
            if stay:
                self._insert_before(node, statements)
            else:
                self._edit(*self._span(node), self._end(node).join(statements))

    def _move_star(self, node: ast.ImportFrom, dotted: str, source: Source) -> None:
        """Import the names by name: beside the star, or instead of it if the namespace replaces the package."""
        uses = {each.id for each in ast.walk(self.file.tree) if isinstance(each, ast.Name)} | set(self.taken)
        targets: dict[str, list[str]] = {}
        for name in sorted(uses & set(source.symbols)):
            if (target := offered(Symbol(source, name, dotted))) is not None:
                targets.setdefault(target, []).append(name)
        statements = [f"from {target} import {', '.join(names)}" for target, names in sorted(targets.items())]
        end = self._end(node)
        if source.whole:
            self._leave(
                node, source, f"from {dotted} import *", "check that all names that are used are imported by name"
            )
            if statements:
                self._edit(*self._span(node), end.join(statements))
        elif statements:
            place = self._span(node)[1]
            if self._begins_line(node):  # after a comment
                place = self._starts[node.lineno - 1] + len(self._line(node.end_lineno or node.lineno))
            self._edit(place, place, "".join(f"{end}{each}" for each in statements))

    def _replace_module(self, node: ast.ImportFrom, dotted: str, target: str) -> None:
        start, end = self._span(node)
        place = self._text.find(dotted, start, end)
        if place < 0:  # it is written with spaces
            self._edit(start, end, ast.unparse(node).replace(f"from {dotted} ", f"from {target} ", 1))
        else:
            self._edit(place, place + len(dotted), target)

    def _remove(self, node: ast.ImportFrom, moving: Collection[ast.alias]) -> dict[ast.alias, str]:
        """Remove names from a statement that keeps others, and return their comments."""
        comments = self._comments(node)
        names = node.names
        last = max(index for index, alias in enumerate(names) if alias not in moving)
        for index, alias in enumerate(names):
            if alias in moving and index < last:
                start, end = self._span(alias)[0], self._span(names[index + 1])[0]
                note = self._text.find("#", start, end)
                if note >= 0:  # its comment moves; comments on lines of their own, which follow, stay
                    first = self._text.index("\n", note)
                    own = self._text.find("#", first, end)
                    end = end if own < 0 else own
                    if alias not in comments:
                        end = note
                self._edit(start, end, "")
        if last + 1 < len(names):
            self._remove_end(node, names[last], names[last + 1], names[-1], comments)
        return {alias: note for alias, note in comments.items() if alias in moving}

    def _remove_end(
        self, node: ast.ImportFrom, kept: ast.alias, first: ast.alias, last: ast.alias, comments: dict[ast.alias, str]
    ) -> None:
        """Remove the names from ``first`` to ``last``, which are the last ones, after one that stays."""
        start, end = self._span(kept)[1], self._span(last)[1]
        note = self._text.rfind("#", start, self._span(first)[0])
        inner = self._text[self._span(first)[0] : self._span(last)[0]].splitlines()[1:]
        own = "".join(f"\n{line}" for line in inner if line.lstrip().startswith("#"))
        closing = self._text[end : self._span(node)[1]]
        comma = closing.lstrip().startswith(",")
        after = note >= 0 or own != ""  # comments follow the comma of the name that stays, which stays too
        if after:
            start = self._text.index("\n", note) if note >= 0 else self._text.index(",", start) + 1
            start -= self._text[start - 1] == "\r"
            end += len(closing) - len(closing.lstrip().removeprefix(",")) if comma else 0
        if last in comments:
            place = self._text.index("#", self._span(last)[1])
            if after:
                end = place + len(comments[last])
            else:
                self._edit(end, place + len(comments[last]), "," if comma else "")
        closes = after and self._text[end:].lstrip(" \t").startswith(")")
        self._edit(start, end, f"{own}\n" if closes else own)

    def _comments(self, node: ast.ImportFrom) -> dict[ast.alias, str]:
        """Return the comment at the end of the line of each name, of several names in a line that of the last one."""
        start, end = self._span(node)
        found: dict[ast.alias, str] = {}
        lines = {alias.end_lineno: alias for alias in node.names}
        for token in tokenize.generate_tokens(io.StringIO(self._text[start:end]).readline):
            alias = lines.get(node.lineno + token.start[0] - 1)
            if token.type == tokenize.COMMENT and alias is not None and self._begins_line(node):
                found[alias] = token.string.rstrip()
        return found

    # --- what stays

    def _leave_reference(self, reference: Reference) -> None:
        source = reference.found.source
        self._leave(reference.node, source, ast.unparse(reference.node), f"{source.namespace} does not have it")

    def _leave(self, node: ast.AST, source: Source, name: str, text: str) -> None:
        line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        entry = source.symbols.get(name.rpartition(" ")[2].rpartition(".")[2])
        text = text if entry is None else f"{text}; in hocket: {entry.text}"
        self.left.append(Use(line, column, source, name, Entry("no counterpart", text)))

    # --- places

    def _line(self, number: int) -> str:
        return self.file.lines[number - 1].rstrip("\r\n")

    def _offset(self, line: int, column: int) -> int:
        """Return the place in the text of a line and a column in bytes, as syntax trees have them."""
        return self._starts[line - 1] + len(self._line(line).encode()[:column].decode(errors="ignore"))

    def _span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _edit(self, start: int, end: int, text: str) -> None:
        self.edits.append(Edit(self._place(start), self._place(end), text))

    def _place(self, offset: int) -> tuple[int, int]:
        line = min(bisect.bisect_right(self._starts, offset), len(self.file.lines))
        return line, offset - self._starts[line - 1]

    def _insert_before(self, node: ast.stmt, statements: Iterable[str]) -> None:
        place = self._span(node)[0]
        self._edit(place, place, "".join(f"{each}{self._end(node)}" for each in statements))

    def _end(self, node: ast.stmt) -> str:
        """Return what separates a new statement from a statement beside it."""
        line = self._line(node.lineno)
        return f"\n{line[: len(line) - len(line.lstrip())]}" if self._begins_line(node) else "; "

    def _begins_line(self, node: ast.stmt) -> bool:
        return not self._text[self._starts[node.lineno - 1] : self._span(node)[0]].strip()


def apply(lines: list[str], edits: list[Edit]) -> list[str]:
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


def _direct(node: ast.expr) -> bool:
    """Whether it is a name of a module that has a name itself: ``L.Trainer``, not ``L.pytorch.Trainer``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _mentions(name: str, node: ast.AST) -> bool:
    """Whether a node uses a name, which a text may also do, such as an annotation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value == name or f"{name}." in node.value
    return isinstance(node, ast.Name) and node.id == name


def _comment(notes: Iterable[str]) -> str:
    texts = [note.lstrip("# ") for note in notes if note]
    return f"  # {'; '.join(texts)}" if texts else ""
