"""The uses of a framework in a file, and what becomes of each."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Collection

from hocket_migration.inspecting import drop_in, entries
from hocket_migration.inspecting.names import Class, Instance, Module, Names, Symbol
from hocket_migration.inspecting.resolving import keywords_of, source_of
from hocket_migration.inspecting.tables import Entry, Kind, Source


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a name of a framework: where it is, what it is called in a report, and what becomes of it."""

    line: int
    column: int
    source: Source
    name: str
    entry: Entry
    #: Whether the drop-in namespace does not have it, or refuses it.
    breaks: bool = False


class Uses:
    """Collects the uses of one file."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[Use, None] = {}

    def ordered(self) -> list[Use]:
        """Return the uses in the order of the text, each once."""
        return sorted(self._found, key=lambda use: (use.line, use.column))

    def add(self, node: ast.AST, source: Source, name: str, entry: Entry | None, breaks: bool = False) -> None:
        """Note a use, unless it has no entry."""
        if entry is None:
            return
        line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute):  # where the name itself is, in a chain of several lines
            line, column = node.end_lineno or line, (node.end_col_offset or len(node.attr)) - len(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # after ``def`` and ``async def``
            column += 4 if isinstance(node, ast.FunctionDef) else 10
        self._found[Use(line, column, source, name, entry, breaks)] = None

    def of_symbol(self, node: ast.expr, found: Symbol) -> None:
        """Note a public name."""
        breaks = drop_in.lacks(found) or drop_in.refuses(found)
        self.add(node, found.source, ast.unparse(node), entries.of_symbol(found), breaks)

    def of_end(self, node: ast.Attribute, base: Module, found: Module) -> None:
        """Note the end of a chain of modules, which may be a module or a function."""
        entry = entries.of_end(found.source, base.dotted, node.attr)
        self.add(node, found.source, ast.unparse(node), entry, drop_in.lacks(found))

    def of_import(self, node: ast.alias, source: Source, dotted: str, found: Symbol | Module) -> None:
        """Note what ``from dotted import name`` imports."""
        entry = entries.of_symbol(found) if isinstance(found, Symbol) else entries.of_import(source, dotted, node.name)
        self.add(node, source, f"import {node.name}", entry, drop_in.lacks(found))

    def of_class(self, node: ast.Attribute, base: Symbol | Class) -> None:
        """Note an attribute of a class."""
        if isinstance(base, Class):
            kinds = [] if node.attr in base.attributes else base.kinds
        else:
            kinds = [kind for kind in [base.source.kind_of(base.name)] if kind is not None]
        for kind in kinds:
            if node.attr in kind.members:
                self.add(node, source_of(kind), f"{base.name}.{node.attr}", kind.members[node.attr])
                return

    def of_instance(self, node: ast.Attribute, base: Instance) -> None:
        """Note an attribute of an instance."""
        for kind in base.kinds:
            if (entry := kind.members.get(node.attr)) is not None:
                if base.of is None or node.attr not in base.of.attributes or kind.returns.get(node.attr):
                    breaks = drop_in.lacks_member(kind, node.attr)
                    self.add(node, source_of(kind), f"{kind.name}.{node.attr}", entry, breaks)
                return
        if isinstance(node.ctx, ast.Store):  # an attribute of the project's own
            self._names.stored.update((kind.source, kind.name, node.attr) for kind in base.kinds)
        elif base.of is None and base.certain and not (kind := base.kinds[0]).open and not node.attr.startswith("__"):
            if (kind.source, kind.name, node.attr) in self._names.stored:
                return
            source, breaks = source_of(kind), drop_in.lacks_member(kind, node.attr)
            entry = entries.unknown(source, node.attr) if breaks or not source.whole else entries.in_drop_in(source)
            self.add(node, source, f"{kind.name}.{node.attr}", entry, breaks)

    def arguments(self, node: ast.Call, called: str, kind: Kind, known: bool) -> None:
        """Note the arguments of a call of a class; ``known``: whether it has the parameters of the framework's class."""
        if not kind.arguments:
            return
        source, order = source_of(kind), list(kind.arguments)
        if known:
            for name, argument in zip(order, node.args, strict=False):
                if isinstance(argument, ast.Starred):
                    self.add(argument, source, f"{called}(*…)", entries.unread(ast.unparse(argument.value)))
                    break
                breaks = drop_in.refuses_argument(kind, "__init__", name, argument)
                self.add(
                    argument, source, f"{called}({name}=)", entries.with_value(kind.arguments[name], argument), breaks
                )
        for keyword in keywords_of(node):
            if keyword.arg is None:
                self.add(keyword.value, source, f"{called}(**…)", entries.unread(ast.unparse(keyword.value)))
            elif known or keyword.arg in kind.arguments:
                entry = kind.arguments.get(keyword.arg) or entries.unknown(source, keyword.arg)
                entry = entries.with_value(entry, keyword.value)
                breaks = drop_in.refuses_argument(kind, "__init__", keyword.arg, keyword.value)
                self.add(keyword, source, f"{called}({keyword.arg}=)", entry, breaks)

    def method_arguments(self, node: ast.Call, base: Instance, method: str, forwarded: Collection[str]) -> None:
        """Note the keyword arguments of a call of a method, without ``**kwargs`` of names in ``forwarded``."""
        for kind in base.kinds:
            table = kind.keywords.get(method)
            if method == "__init__":
                table = kind.arguments
            for keyword in keywords_of(node) if table else ():
                assert table is not None
                if keyword.arg is None:
                    if isinstance(keyword.value, ast.Name) and keyword.value.id in forwarded:
                        continue
                    called = f"{kind.name}.{method}(**…)"
                    self.add(keyword.value, source_of(kind), called, entries.unread(ast.unparse(keyword.value)))
                elif (entry := table.get(keyword.arg)) is not None:
                    breaks = drop_in.refuses_argument(kind, method, keyword.arg, keyword.value)
                    self.add(keyword, source_of(kind), f"{kind.name}.{method}({keyword.arg}=)", entry, breaks)

    def overriding(self, node: ast.stmt | ast.expr, name: str, cls: Class, parameters: Collection[str] = ()) -> None:
        """Note that a class overrides an attribute, or a method with parameters of these names."""
        for kind in cls.kinds:
            if (entry := kind.members.get(name)) is not None:
                breaks = drop_in.lacks_member(kind, name) or drop_in.refuses_override(kind, name, parameters)
                self.add(node, source_of(kind), f"{kind.name}.{name}", entry, breaks)
                return
