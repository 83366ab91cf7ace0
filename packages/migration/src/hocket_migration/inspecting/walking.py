"""Walk the syntax tree of a file: learn what its names refer to, and find each use of a framework."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from hocket_migration.inspecting import entries
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
    framework_of,
    member_of_module,
    uncertain,
)
from hocket_migration.inspecting.reading import SourceFile
from hocket_migration.inspecting.resolving import Resolver, instance_of, is_name, is_none, source_of
from hocket_migration.inspecting.tables import Entry, Kind
from hocket_migration.inspecting.uses import Use, Uses


@dataclasses.dataclass(frozen=True)
class Reference:
    """A place in the text that names a public name or a module of a framework through a module, such as ``L.Trainer``."""

    node: ast.Attribute | ast.Name
    found: Symbol | Module
    #: The local name of the module that it goes through.
    through: str


class Walker(Resolver, ast.NodeVisitor):
    """One round over a file."""

    def __init__(self, file: SourceFile, names: Names) -> None:
        super().__init__(file, names)
        self._uses = Uses(names)
        self.references: list[Reference] = []
        self._functions: list[Function] = []
        self._class_scopes: list[dict[str, Ref]] = []

    def walk(self) -> list[Use]:
        """Return the uses in the order of the text."""
        self.visit(self.file.tree)
        return self._uses.ordered()

    # --- imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            local = self.names.local_module(alias.name, self.file.module)
            source = framework_of(alias.name)
            bound = alias.asname or alias.name.partition(".")[0]
            if local is not None:
                target = (
                    local if alias.asname else local.removesuffix(alias.name).rstrip(".") or local.partition(".")[0]
                )
                self._bind(bound, Local(target))
            elif source is not None:
                self._bind(bound, Module(source, alias.name if alias.asname else bound))
                self._uses.add(alias, source, f"import {alias.name}", source.imported)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        dotted = node.module or ""
        if node.level:
            parts = self.file.module.split(".")
            keep = len(parts) - node.level + (self.file.module in self.names.packages)
            dotted = ".".join([*parts[: max(keep, 0)], *([dotted] if dotted else [])])
        local = self.names.local_module(dotted, self.file.module) if dotted else ""
        if local is not None or node.level:
            for alias in node.names:
                self._import_local(local or dotted, alias)
            return
        source = framework_of(dotted)
        for alias in node.names if source is not None else ():
            assert source is not None
            if alias.name == "*":
                for name in source.symbols:
                    self._bind(name, Symbol(source, name, dotted))
                self._uses.add(node, source, f"from {dotted} import *", entries.star(source))
                continue
            found = member_of_module(Module(source, dotted), alias.name)
            self._bind(alias.asname or alias.name, found)
            assert isinstance(found, Symbol | Module)
            self._uses.of_import(alias, source, dotted, found)

    def _import_local(self, module: str, alias: ast.alias) -> None:
        if alias.name == "*":
            for name, each in list(self.names.modules.get(module, {}).items()):
                self._bind(name, each)
            return
        if (found := self.names.exported(module, alias.name)) is not None:
            self._bind(alias.asname or alias.name, found)

    # --- names and attributes

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            found = self.ref(node)
            if isinstance(found, Symbol):
                self._uses.of_symbol(node, found)
            elif isinstance(found, Module):
                self._refer(node, found)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base, found = self.ref(node.value), self.ref(node)
        if isinstance(base, Module):
            if isinstance(found, Symbol):
                self._uses.of_symbol(node, found)
            elif isinstance(found, Module):  # the end of a chain; inner ones are not visited
                self._uses.of_end(node, base, found)
            if isinstance(found, Symbol | Module):
                self._refer(node, found)
            return
        if isinstance(base, Symbol | Class):
            self._uses.of_class(node, base)
        elif isinstance(base, Instance):
            self._uses.of_instance(node, base)
        self.visit(node.value)

    def _refer(self, node: ast.Attribute | ast.Name, found: Symbol | Module) -> None:
        first: ast.AST = node
        while isinstance(first, ast.Attribute):
            first = first.value
        if isinstance(first, ast.Name):
            self.references.append(Reference(node, found, first.id))

    # --- calls

    def visit_Call(self, node: ast.Call) -> None:
        function = self.ref(node.func)
        self.visit(node.func)
        if isinstance(function, Symbol) and (kind := function.source.kind_of(function.name)) is not None:
            self._uses.arguments(node, kind.name if len(kind.symbols) == 1 else function.name, kind, True)
        elif isinstance(function, Class):
            for kind in function.kinds:
                self._uses.arguments(node, function.name, kind, known=not function.own_arguments)
            self._pass(node, function)
        elif isinstance(node.func, ast.Attribute):
            base = self.ref(node.func.value)
            if isinstance(base, Instance):
                forwarded = {function.keywords for function in self._functions}  # which callers give
                self._uses.method_arguments(node, base, node.func.attr, forwarded)
        if isinstance(function, Function):
            self._pass_to(node.args, node.keywords, function)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)

    def _pass(self, node: ast.Call, cls: Class) -> None:
        made = cls.attributes.get("__init__")
        if isinstance(made, Function):
            self._pass_to(node.args, node.keywords, made)

    def _pass_to(self, args: Sequence[ast.expr], keywords: Iterable[ast.keyword], function: Function) -> None:
        known = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), args)
        given = dict(zip(function.parameters[: function.positional], known, strict=False))
        given |= {each.arg: each.value for each in keywords if each.arg in function.parameters}
        for name, value in given.items():
            if isinstance(found := self.ref(value), Instance):
                self.names.learn(function.known, name, found)
            if not is_none(value):
                self.names.doubt(function.known, name, found)

    # --- definitions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(each)
        cls = self.names.classes.setdefault(node, Class(node.name, []))
        for base in node.bases:
            found = self.ref(base)
            new: list[Kind] = []
            if isinstance(found, Symbol) and (kind := found.source.kind_of(found.name)) is not None:
                new = [kind]
            elif isinstance(found, Class):
                new = found.kinds
                cls.own_arguments |= found.own_arguments
                for name, known in found.attributes.items():
                    cls.attributes.setdefault(name, known)
                for kind in new:
                    text = Entry("maps", f"{kind.name} by {found.name}, which stays as it is")
                    self._uses.add(base, source_of(kind), found.name, text)
            cls.own_arguments |= not new
            for kind in new:
                if kind not in cls.kinds:
                    cls.kinds.append(kind)
                    self.names.learned += 1
        made = [
            each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")
        ]
        cls.own_arguments |= bool(made or node.decorator_list or node.keywords)
        self._bind(node.name, cls)
        self._classes.append(cls)
        self.scopes.append(self.names.scopes.setdefault(node, {}))
        self._class_scopes.append(self.scopes[-1])
        for statement in node.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._uses.overriding(target, target.id, cls)
            self.visit(statement)
        self._class_scopes.pop()
        self.scopes.pop()
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = node.args
        arguments = [*given.posonlyargs, *given.args]
        for decorator in node.decorator_list:
            self.visit(decorator)
        for argument in (*arguments, *given.kwonlyargs, given.vararg, given.kwarg):
            self._annotation(argument.annotation if argument is not None else None)
        for default in (*given.defaults, *given.kw_defaults):
            if default is not None:
                self.visit(default)
        cls = self._classes[-1]
        method = cls is not None and self.scopes[-1] is self._class_scopes[-1]
        static = any(is_name(each, "staticmethod") for each in node.decorator_list)
        function = self.names.functions.setdefault(
            node,
            Function(
                [each.arg for each in (*arguments[method and not static :], *given.kwonlyargs)],
                len(arguments[method and not static :]),
                given.kwarg.arg if given.kwarg is not None else "",
            ),
        )
        scope = self.names.scopes.setdefault(node, {})
        for argument in (*arguments, *given.kwonlyargs):
            self.names.learn(scope, argument.arg, self._of_annotation(argument.annotation))
        self._learn_defaults(scope, given)
        for name, known in function.known.items():
            self.names.learn(scope, name, known)
            self.names.doubt(scope, name, known)
        if method:
            assert cls is not None
            self._method(node, cls, function, scope, [] if static else arguments)
        else:
            self._bind(node.name, function)
        self.scopes.append(scope)
        self._functions.append(function)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self.scopes.pop()
        self._annotation(node.returns)
        if function.returns is None and (returned := self._of_annotation(node.returns)) is not None:
            function.returns = returned
            self.names.learned += 1

    def _learn_defaults(self, scope: dict[str, Ref], given: ast.arguments) -> None:
        """Note what the defaults of parameters are; callers may give something else."""
        positional = [*given.posonlyargs, *given.args]
        last = positional[len(positional) - len(given.defaults) :]
        for argument, default in (
            *zip(last, given.defaults, strict=True),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ):
            found = self.ref(default)
            if isinstance(found, Instance | Class | Symbol):
                self.names.learn(scope, argument.arg, uncertain(found))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        scope = self.names.scopes.setdefault(node, {})
        self._learn_defaults(scope, node.args)
        self.scopes.append(scope)
        self.visit(node.body)
        self.scopes.pop()

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.scopes.append(self.names.scopes.setdefault(node, {}))
        for each in node.generators:
            self.visit(each.iter)
            if isinstance(found := self.ref(each.iter), Elements):
                self._store(each.target, found.each)
            for condition in each.ifs:
                self.visit(condition)
        for value in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.visit(value)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def _method(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        cls: Class,
        function: Function,
        scope: dict[str, Ref],
        arguments: Sequence[ast.arg],
    ) -> None:
        """Note what a method overrides, and what its arguments are; ``arguments`` begin with ``self`` or ``cls``."""
        self._uses.overriding(node, node.name, cls, [each.arg for each in arguments])
        if not any(node.name in kind.members for kind in cls.kinds):
            self.names.learn(cls.attributes, node.name, function)
        if not arguments:
            return
        of_class = any(is_name(each, "classmethod") for each in node.decorator_list)
        scope[arguments[0].arg] = cls if of_class else Instance(tuple(cls.kinds), cls)
        for kind in cls.kinds:
            passed = kind.passes.get(node.name, kind.first if node.name in kind.members else ())
            for argument, of in zip(arguments[1:], passed, strict=False):
                self.names.learn(scope, argument.arg, instance_of(kind, of))

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _annotation(self, node: ast.expr | None) -> None:
        """Find the uses in an annotation, which may be a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = self.annotated(node)
            if isinstance(found, Symbol):
                self._uses.add(node, found.source, node.value, entries.of_symbol(found))
        elif node is not None:
            self.visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        found = self.ref(node.value)
        if not self._functions or node.value is None or is_none(node.value):
            return
        function = self._functions[-1]
        if function.returns is None and isinstance(found, Instance):
            function.returns = found
            self.names.learned += 1
        elif function.returns is not None and function.returns != found:
            function.returns = uncertain(function.returns)

    # --- assignments

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        for each in (node.target, node.value):
            if each is not None:
                self.visit(each)
        found = self._of_annotation(node.annotation)
        if found is not None:
            self._store(node.target, found)
        elif node.value is not None:
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        if isinstance(found := self.ref(node.iter), Elements):
            self._store(node.target, found.each)
        self.visit(node.target)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For  # type: ignore[assignment]

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            if len(target.elts) == len(value.elts):
                for each, its in zip(target.elts, value.elts, strict=True):
                    self._assign(each, its)
            return
        found = self.ref(value)
        if isinstance(found, Instance | Class | Symbol | Function | Module | Elements):
            self._store(target, found)
        if not is_none(value) and (place := self._place_of(target)) is not None:
            self.names.doubt(*place, found)

    def _store(self, target: ast.expr, found: Ref) -> None:
        if (place := self._place_of(target)) is not None:
            self.names.learn(*place, found)

    def _place_of(self, target: ast.expr) -> tuple[dict[str, Ref], str] | None:
        """Return where it is noted what a target refers to: a scope, or the attributes of a class of the project."""
        if isinstance(target, ast.Name):
            return self.scopes[-1], target.id
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            owner = self.ref(target.value)
            cls = owner.of if isinstance(owner, Instance) else None
            return None if cls is None else (cls.attributes, target.attr)
        return None
