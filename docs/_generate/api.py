"""Pages of what can be imported: one for each public module, and one for each class of ``hocket`` itself."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import surface
from markup import directive, link_between, page, summary, table

import hocket
from hocket.help.ours import PACKAGES
from hocket.hookspecs import SPECS
from hocket.plugins import Entry, registry


class Place(NamedTuple):
    """Where something is documented: the page, and the path to import it by."""

    page: str
    path: str


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by name."""
    found = {}
    for name in surface.MODULES:
        rows, own = [], []
        for short, value in surface.public(importlib.import_module(name)).items():
            path = f"{name}.{short}"
            place = places().get(id(value), Place(_of(name), path))
            if inspect.ismodule(value):
                shown = f"[`{path}`]({link_between(_of(name), _of(path))})" if path in surface.MODULES else f"`{path}`"
                rows.append([shown, summary(value)])
            elif place.path != path:
                rows.append([f"`{path}`", f"the same as {{py:obj}}`{place.path}`"])
            else:
                to = link_between(_of(name), place.page)
                rows.append(
                    [
                        f"[`{short}`]({to})" if to else f"{{py:obj}}`~{path}`",
                        summary(value) if _documented(value) else "",
                    ]
                )
                if place.page == _of(name):
                    own.append(documentation(path, value))
                elif place.page == _of(path):
                    opening = f"Look up here how `{path}` is called, what it does and what it raises."
                    found[place.page] = page(short, opening, documentation(path, value))
        opening = f"Look up here what `{name}` has to import: arguments, results, errors and examples."
        described = summary(importlib.import_module(name))
        found[_of(name)] = page(
            name, opening, directive("py:module", name), described, table(["name", "what it is"], rows), *own
        )
    rows = [
        [f"[`{name}`]({link_between('api/index', _of(name))})", summary(importlib.import_module(name))]
        for name in surface.MODULES
    ]
    opening = (
        "Look up here what you can import, and from which module. Names that no page lists are private and may change."
    )
    return found | {"api/index": page("Python API", opening, table(["module", "what it has"], rows))}


@functools.cache
def places() -> dict[int, Place]:
    """Return where each object with a name is documented, by its identity. What is a plug-in, or a hook, has its page there."""
    found = {id(spec): Place("hooks", f"hocket.hookspecs.{spec.__name__}") for spec in SPECS}
    plugins = {id(entry.load()): entry for entry in ours() if entry.kind != "commands"}
    for name in surface.MODULES:
        for short, value in surface.public(importlib.import_module(name)).items():
            path = f"{name}.{short}"
            if not _documented(value):
                continue
            if (entry := plugins.get(id(value))) is not None:
                found.setdefault(id(value), Place(plugin_page(entry), path))
            own = inspect.isclass(value) and name == hocket.__name__
            found.setdefault(id(value), Place(_of(path if own else name), path))
    return found


def documentation(path: str, value: Any) -> str:
    """Return the directive that renders a docstring."""
    if not _documented(value):
        return directive("py:data", path)
    if inspect.isroutine(value):
        return directive("autofunction", path)
    members = surface.members(value) if path.rpartition(".")[0] == hocket.__name__ else {}
    options = [f"members: {', '.join(members)}", "undoc-members:"] if members else ["members:"]
    return directive("autoexception" if issubclass(value, BaseException) else "autoclass", path, *options)


def ours() -> list[Entry]:
    """Return the plug-ins of hocket's own packages."""
    return [entry for entry in registry.entries() if entry.dist in PACKAGES.values()]


def plugin_page(entry: Entry) -> str:
    """Return the page of a plug-in."""
    return f"commands/{entry.name}" if entry.kind == "commands" else f"plugins/{entry.kind}/{entry.name}"


def _documented(value: object) -> bool:
    """Whether a docstring is of the object itself, and not of its class."""
    return inspect.isclass(value) or inspect.isroutine(value)


def _of(path: str) -> str:
    """Return the page of a module, or of a class of hocket's own."""
    if path in surface.MODULES:
        return "api/hocket/index" if path == hocket.__name__ else f"api/{path.replace('.', '-')}"
    return f"api/hocket/{path.rpartition('.')[2]}"
