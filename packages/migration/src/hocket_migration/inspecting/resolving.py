"""Resolve expressions: what they refer to, in the scopes around them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence

from hocket_migration.inspecting.names import (
    Class,
    Elements,
    Function,
    Instance,
    Local,
    Module,
    Names,
    Ref,
    Symbol,
    member_of_module,
    uncertain,
)
from hocket_migration.inspecting.reading import SourceFile
from hocket_migration.inspecting.tables import Kind, Source, sources


class Resolver:
    """The scopes around a place in a file, and what expressions refer to there."""

    def __init__(self, file: SourceFile, names: Names) -> None:
        self.file, self.names = file, names
        self.scopes: list[dict[str, Ref]] = [names.modules[file.module]]
        self._classes: list[Class | None] = [None]

    def ref(self, node: ast.AST | None) -> Ref | None:
        """Return what an expression refers to, or None if that is unknown or nothing of a framework."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        if isinstance(node, ast.Attribute):
            return self._member(self.ref(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Await | ast.NamedExpr | ast.Starred):
            return self.ref(node.value)
        if isinstance(node, ast.IfExp):
            return self._either([node.body, node.orelse])
        if isinstance(node, ast.BoolOp):
            return self._either(node.values)
        if isinstance(node, ast.List | ast.Tuple | ast.Dict):
            return self._elements(node.values if isinstance(node, ast.Dict) else node.elts)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            return self._elements([node.value if isinstance(node, ast.DictComp) else node.elt])
        if isinstance(node, ast.Subscript):  # elements[0]; Optional[Trainer], list[Trainer]
            if isinstance(found := self.ref(node.value), Elements):
                return found.each
            return (
                self.annotated(node.slice) if isinstance(node.slice, ast.Name | ast.Attribute | ast.Constant) else None
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # Trainer | None
            return self._either([node.left, node.right])
        return None

    def annotated(self, node: ast.expr | None) -> Ref | None:
        """Return what an annotation refers to, which may be a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return self.ref(ast.parse(node.value, mode="eval").body)
            except (SyntaxError, ValueError):  # a text that is no annotation
                return None
        return self.ref(node)

    def _elements(self, nodes: Sequence[ast.expr]) -> Ref | None:
        found = self._either(nodes)
        return Elements(found) if isinstance(found, Instance) else None

    def _either(self, nodes: Sequence[ast.expr]) -> Ref | None:
        """Return what the first one of several expressions refers to that is known; it is certain if all are the same."""
        found = [self.ref(node) for node in nodes if not is_none(node)]
        known: Ref | None = next((each for each in found if isinstance(each, Instance)), None)
        known = known or next((each for each in found if each is not None), None)
        return known if known is None or all(each == known for each in found) else uncertain(known)

    def _member(self, base: Ref | None, name: str) -> Ref | None:
        if isinstance(base, Module):
            return member_of_module(base, name)
        if isinstance(base, Local):
            return self.names.exported(base.module, name)
        if isinstance(base, Instance):
            if base.of is not None and name in base.of.attributes:
                return base.of.attributes[name]
            for kind in base.kinds:
                if (returned := kind.returns.get(name)) is not None:
                    return instance_of(kind, returned)
        return None

    def _called(self, call: ast.Call) -> Ref | None:
        function = self.ref(call.func)
        if isinstance(function, Symbol):
            kind = function.source.kind_of(function.name)
            return None if kind is None else Instance((kind,))
        if isinstance(function, Class):
            return Instance(tuple(function.kinds), function)
        if isinstance(function, Function):
            return function.returns
        if isinstance(call.func, ast.Name) and call.func.id == "super" and (cls := self._classes[-1]) is not None:
            return Instance(tuple(cls.kinds), cls)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("load_from_checkpoint", "from_pretrained"):
            owner = self.ref(call.func.value)
            if isinstance(owner, Class):
                return Instance(tuple(owner.kinds), owner)
        return None

    def _of_annotation(self, node: ast.expr | None) -> Ref | None:
        """Return an instance of the class that an annotation names."""
        if isinstance(node, ast.BinOp):
            sides = [self._of_annotation(side) for side in (node.left, node.right) if not is_none(side)]
            found = next((each for each in sides if each is not None), None)
            return uncertain(found) if found is not None and len(sides) > 1 else found
        named = self.annotated(node)
        if isinstance(named, Symbol):
            kind = named.source.kind_of(named.name)
            return None if kind is None else Instance((kind,))
        return Instance(tuple(named.kinds), named) if isinstance(named, Class) else None

    def _bind(self, name: str, found: Ref) -> None:
        self.names.learn(self.scopes[-1], name, found)


def is_none(node: ast.AST) -> bool:
    """Whether an expression is None."""
    return isinstance(node, ast.Constant) and node.value is None


def is_name(node: ast.AST, name: str) -> bool:
    """Whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def source_of(kind: Kind) -> Source:
    """Return the framework of a class."""
    return sources()[kind.source]


def instance_of(kind: Kind, name: str) -> Instance | None:
    """Return an instance of another class of the framework of ``kind``."""
    found = source_of(kind).kinds.get(name)
    return None if found is None else Instance((found,))


def keywords_of(call: ast.Call) -> Iterator[ast.keyword]:
    """Yield the keyword arguments of a call, those of ``**{"name": value}`` and ``**dict(name=value)`` one by one."""
    for keyword in call.keywords:
        yield from (keyword,) if keyword.arg is not None else _named(keyword.value)


def _named(mapping: ast.expr) -> Iterator[ast.keyword]:
    """Yield the items of a mapping as keyword arguments; those whose names are not known have none."""
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if key is None:
                yield from _named(value)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield ast.copy_location(ast.keyword(key.value, value), key)
            else:
                yield ast.copy_location(ast.keyword(None, key), key)
    elif isinstance(mapping, ast.Call) and is_name(mapping.func, "dict"):
        for each in mapping.args:
            yield from _named(each)
        yield from keywords_of(mapping)
    elif isinstance(mapping, ast.BinOp) and isinstance(mapping.op, ast.BitOr):
        yield from _named(mapping.left)
        yield from _named(mapping.right)
    else:
        yield ast.copy_location(ast.keyword(None, mapping), mapping)
