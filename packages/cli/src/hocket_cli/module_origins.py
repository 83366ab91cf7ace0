"""Where the modules of a configuration come from: the user's folders, and those where a recorded run had them.

A configuration is a program: what it names is imported and called. Before that, the user reads here which modules of a
recorded run are elsewhere, and says that they trust a run from outside of the working folder.
"""

from __future__ import annotations

import hashlib
import os
import pkgutil
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import safe_files
from hocket.basics.run_folder import is_url
from hocket_cli import imports
from hocket_cli.document import ConfigError, Node

if TYPE_CHECKING:
    from hocket_cli.recorded_config import Source

#: The length of a checksum, which no version has.
CHECKSUM = 64
#: Bytes of the largest file of which a checksum is made.
_LARGEST = 64 << 20


def importable(read: Source, trusted: bool, say: bool = True) -> None:
    """Let modules beside the file, in the working folder and where the file recorded them be imported.

    This includes ``python -P``, with which ranks are started. What comes from elsewhere is said first, on one rank, and never
    takes the place of the standard library. Raises ConfigError for a run that has to be trusted first.
    """
    places = _Places.of(read)
    where = f"--from {shown(read.repeats)}" if read.repeats else shown(read.file or "")
    hidden = places.hidden()
    if read.made and not trusted and (why := _to_trust(read, places)):
        again = where if read.repeats else f"{'' if where.endswith('.yaml') else '--from '}{shlex.quote(where)}"
        raise ConfigError(
            where,
            f"{why}. A configuration is a program: this one imports {', '.join(_named(read.document, places))}. "
            f"{f'It would import {hidden} instead of what is installed. ' if hidden else ''}Nothing has been imported yet. If "
            f"you trust whoever wrote them, add --trust. To read it first: hocket train --print-config {again}",
        )
    _check(where, places)
    lines = []
    if places.modules:
        there = ", ".join(f"{name} ({shown(file)})" for name, file in places.modules.items())
        verb = "are" if len(places.modules) > 1 else "is"
        lines.append(f"{there} {verb} imported from where it was recorded, not from this folder.")
    lines += [f"Imported from there instead of what is installed: {hidden}."] if hidden else []
    for line in lines if say and os.environ.get("RANK", "0") == "0" else ():
        print(f"hocket: {line}", file=sys.stderr, flush=True)
    sys.path[:] = places.path()
    if read.made:  # by somebody perhaps, whose names of modules nobody should install
        imports.RECORDED.update({re.split("[.:]", path)[0]: [] for path in paths(read.document)})
        imports.RECORDED.update(read.made.get("sources", {}))


def folders(read: Source) -> list[str]:
    """Return the folders whose modules are the user's or the run's, not installed."""
    places = _Places.of(read)
    return [*places.own, *places.elsewhere]


def paths(node: Node) -> Iterator[str]:
    """Yield the import paths in a configuration."""
    found = imports.reference(node, dotted=True)
    if found is not None:
        yield found.path
    children = node.value.values() if isinstance(node.value, dict) else node.value
    for child in children if isinstance(node.value, dict | list) else ():
        yield from paths(child)


def digest(file: str | None) -> str | None:
    """Return the checksum of a regular file; None for any other, which might have no end."""
    try:
        return None if file is None else hashlib.sha256(safe_files.content(file, _LARGEST)).hexdigest()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Places:
    #: The user's folders.
    own: list[str]
    #: Other folders with modules that the document names, where its run had them.
    elsewhere: list[str]
    #: Whether those precede the user's: modules there are as recorded and none in the user's is, or the user's have none.
    first: bool
    #: Where each named module is that comes from elsewhere.
    modules: dict[str, str]

    @classmethod
    def of(cls, read: Source) -> _Places:
        beside = [os.path.dirname(os.path.realpath(each)) for each in (read.file,) if each is not None]
        if not read.made:
            return cls(list(dict.fromkeys([*beside, os.getcwd()])), [], False, {})
        names = {re.split("[.:]", path)[0] for path in paths(read.document)}
        recorded = _recorded(read.made)
        own = [os.getcwd()]
        here = [each for name in recorded for each in _in(own, name)]
        there = [each for each in recorded.values() if each]
        same = [any(_is_recorded(read.made, Path(each).stem, each) for each in places) for places in (here, there)]
        first = not same[0] and (same[1] or not here)
        others = [os.path.dirname(each) for each in there] + beside
        others += [os.path.dirname(os.path.realpath(each)) for each in (read.made.get("file"),) if each]
        others = [each for each in dict.fromkeys(others) if each not in own]
        order = [*others, *own] if first else [*own, *others]
        found = {name: spec for name in sorted(names) if (spec := PathFinder.find_spec(name, order))}
        modules = {name: _file(spec) for name, spec in found.items()}
        modules = {name: file for name, file in modules.items() if os.path.dirname(file) in others}
        return cls(own, [each for each in others if each in map(os.path.dirname, modules.values())], first, modules)

    def path(self) -> list[str]:
        """Return ``sys.path`` with the folders: the user's first, as in Python, and others after the standard library."""
        rest = [each for each in sys.path if each not in {*self.own, *self.elsewhere}]
        if not self.elsewhere:
            return [*self.own, *rest]
        library = {os.path.realpath(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib")}
        library |= {os.path.join(each, "lib-dynload") for each in library}
        last = max((i for i, each in enumerate(rest) if os.path.realpath(each) in library), default=-1) + 1
        before, after = rest[:last], rest[last:]
        return (
            [*before, *self.elsewhere, *self.own, *after]
            if self.first
            else [*self.own, *before, *self.elsewhere, *after]
        )

    def hidden(self) -> str:
        """Return the modules in the other folders that precede installed ones of the same name; or empty."""
        found = [
            f"{each.name} ({shown(folder)})"
            for folder in self.elsewhere
            for each in pkgutil.iter_modules([folder])
            if each.name not in sys.stdlib_module_names and self.installed(each.name)
        ]
        return ", ".join(found)

    def installed(self, name: str) -> bool:
        """Whether a module is neither in the user's folders nor elsewhere, but installed. Nothing is imported."""
        rest = [each for each in sys.path if each and each not in {*self.own, *self.elsewhere}]
        finders = [each for each in sys.meta_path if hasattr(each, "find_spec")]
        return any(each.find_spec(name, rest if each is PathFinder else None) for each in finders)


def _check(where: str, places: _Places) -> None:
    """Raise ConfigError for a recorded module that the standard library has, too: it is not replaced."""
    for name in sorted(places.modules.keys() & sys.stdlib_module_names):
        folder = shown(os.path.dirname(places.modules[name]))
        raise ConfigError(
            where,
            f"The run had the module {name} at {shown(places.modules[name])}. The standard library has one of this name, which "
            f"a recorded run does not replace. Type the command in {folder}, or rename the module.",
        )


def _to_trust(read: Source, places: _Places) -> str:
    """Return why a recorded run has to be trusted, as the beginning of a sentence; or empty."""
    place = read.repeats or read.file or ""
    if is_url(place) or not any(map(_is_inside, (os.path.abspath(place), os.path.realpath(place)))):
        return f"This run is outside of the working folder, {shown(os.getcwd())}"
    if not all(_is_inside(os.path.realpath(each)) for each in places.elsewhere):
        return f"Modules of this run are outside of the working folder, {shown(os.getcwd())}"
    return ""


def _is_inside(place: str) -> bool:
    return Path(place).is_relative_to(os.path.realpath(os.getcwd()))


def _named(document: Node, places: _Places) -> list[str]:
    """Return the modules that a configuration names, each with where it comes from."""
    named, found = list(paths(document)), []
    for name in sorted({re.split("[.:]", path)[0] for path in named}):
        if name in places.modules:
            where = shown(places.modules[name])
        elif _in(places.own, name):
            where = "in this folder"
        elif name in sys.stdlib_module_names:
            where = "in the standard library"
        elif places.installed(name):
            where = "installed"
        elif any(path.startswith((f"{name}:", f"{name}.")) and ":" in path for path in named):
            where = "not found"
        else:  # a text with dots
            continue
        found.append(f"{name} ({where})")
    return found or ["installed plug-ins only"]


def _file(spec: ModuleSpec) -> str:
    """Return the file of a module, or the folder of a package."""
    places = list(spec.submodule_search_locations or ())
    return str(places[0] if places else spec.origin)


def _in(folders: list[str], name: str) -> list[str]:
    """Return the paths of a module in folders."""
    places = [f"{folder}/{name}{ending}" for folder in folders for ending in (".py", "")]
    return [each for each in places if os.path.exists(each)]


def _recorded(made: Mapping[str, Any]) -> dict[str, str]:
    """Return where each recorded module is now: by its path from the file, else where it was; empty if at neither."""
    found = made.get("sources", {}).items()
    return {name: next(filter(os.path.exists, places), "") for name, places in found}


def _is_recorded(made: Mapping[str, Any], name: str, place: str) -> bool:
    """Whether the files of a module, or of a package, are those of which a recorded configuration has checksums."""
    then = {
        module: checksum
        for module, checksum in made.get("modules", {}).items()
        if module.partition(".")[0] == name and len(str(checksum)) == CHECKSUM
    }
    files = [Path(place, *module.split(".")[1:]) for module in then]
    files = [each / "__init__.py" if each.is_dir() else each.with_suffix(".py") for each in files]
    return bool(then) and [digest(str(each)) for each in files] == list(then.values())


def shown(path: str | None) -> str:
    """Return a path as a terminal may show it."""
    return path if path and path.isprintable() else ascii(path)
