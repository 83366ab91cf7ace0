"""What an expression of a project refers to: a name of a framework, an instance of its classes, or something of the project."""

from __future__ import annotations

import ast
import dataclasses

from hocket_migration.inspecting.reading import SourceFile
from hocket_migration.inspecting.tables import Kind, Source, sources


@dataclasses.dataclass(frozen=True)
class Module:
    """A package or module of a framework, ``parts`` after the name of the package."""

    source: Source
    dotted: str


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A public name of a framework."""

    source: Source
    name: str
    #: The module that it was taken from.
    dotted: str


@dataclasses.dataclass(eq=False)
class Class:
    """A class of the project that inherits from classes of frameworks."""

    name: str
    kinds: list[Kind]
    #: What is known of attributes of its instances.
    attributes: dict[str, Ref] = dataclasses.field(default_factory=dict)
    #: Whether its instances are made with other arguments than those of the framework's class.
    own_arguments: bool = False


@dataclasses.dataclass(eq=False)
class Function:
    """A function or method of the project: what is known of its parameters and of what it returns."""

    parameters: list[str]
    #: How many parameters take positional arguments: the first ones.
    positional: int
    #: The name of ``**kwargs``, or empty.
    keywords: str = ""
    known: dict[str, Ref] = dataclasses.field(default_factory=dict)
    returns: Ref | None = None


@dataclasses.dataclass(frozen=True)
class Instance:
    """An instance of classes of frameworks; ``of`` is the project's class, or None for one of a framework itself."""

    kinds: tuple[Kind, ...]
    of: Class | None = None
    #: Whether it cannot be something else, such as what another call passes.
    certain: bool = True


def uncertain(found: Ref) -> Ref:
    """Return what an expression may refer to, among other things."""
    if isinstance(found, Elements):
        return dataclasses.replace(found, each=uncertain(found.each))
    return dataclasses.replace(found, certain=False) if isinstance(found, Instance) else found


@dataclasses.dataclass(frozen=True)
class Local:
    """A module of the project."""

    module: str


@dataclasses.dataclass(frozen=True)
class Elements:
    """A list, tuple or dict, each element of which refers to the same."""

    each: Ref


Ref = Module | Symbol | Class | Function | Instance | Local | Elements


def framework_of(dotted: str) -> Source | None:
    """Return the framework of a dotted module name, or None."""
    top = dotted.partition(".")[0]
    return next((source for source in sources().values() if top in source.packages), None)


#: Modules that have an entry in the tables.
_MODULES = ("functional", "dist", "reproducibility", "module_surgery")


def member_of_module(module: Module, name: str) -> Ref:
    """Return what ``module.name`` is: a public name, or a module inside."""
    if name in module.source.symbols and name not in _MODULES:
        return Symbol(module.source, name, module.dotted)
    if name.islower():
        return Module(module.source, f"{module.dotted}.{name}")
    return Symbol(module.source, name, module.dotted)


class Names:
    """The names of all files of a project, filled in rounds until nothing new is found."""

    def __init__(self, files: list[SourceFile]) -> None:
        self.modules: dict[str, dict[str, Ref]] = {file.module: {} for file in files}
        self.packages = {file.module for file in files if file.path.name == "__init__.py"}
        #: Objects by the syntax node that defines them.
        self.classes: dict[ast.AST, Class] = {}
        self.functions: dict[ast.AST, Function] = {}
        self.scopes: dict[ast.AST, dict[str, Ref]] = {}
        #: Attributes that the project stores in instances of a framework's classes: framework, class, name.
        self.stored: set[tuple[str, str, str]] = set()
        #: How often something was learned.
        self.learned = 0

    def local_module(self, dotted: str, of: str) -> str | None:
        """Return the name of the project's module that ``import dotted`` finds from the module ``of``, or None."""
        beside = of.rpartition(".")[0]
        for candidate in (dotted, f"{beside}.{dotted}" if beside else dotted):
            if candidate in self.modules or any(each.startswith(f"{candidate}.") for each in self.modules):
                return candidate
        # A project's folder is often a package itself, which files import by its name.
        tail = dotted.partition(".")[2]
        return tail if tail and tail in self.modules else None

    def learn(self, where: dict[str, Ref], name: str, ref: Ref | None) -> None:
        """Note what a name refers to; the first finding stays."""
        if ref is not None and where.get(name) is None:
            where[name] = ref
            self.learned += 1

    def doubt(self, where: dict[str, Ref], name: str, ref: Ref | None) -> None:
        """Note that a name refers to something else too."""
        known = where.get(name)
        if known is not None and known != ref and uncertain(known) != known:
            where[name] = uncertain(known)
            self.learned += 1

    def exported(self, module: str, name: str) -> Ref | None:
        """Return what a name of a module of the project refers to, or None if that is unknown or nothing of a framework."""
        if f"{module}.{name}" in self.modules:
            return Local(f"{module}.{name}")
        return self.modules.get(module, {}).get(name)
