"""The catalog: which plug-ins there are, by kind and name, without importing any of them."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import importlib_metadata

from hocket.plugins import switches
from hocket.plugins.errors import AmbiguousPluginError, BrokenPluginError, PluginError, UnknownPluginError

#: What plug-ins can be. The entry-point group of a kind is ``hocket.v1.<kind>``.
KINDS = (
    "actions",
    "algorithms",
    "callbacks",
    "commands",
    "datasets",
    "devices",
    "loggers",
    "optimizers",
    "precisions",
    "schedules",
    "strategies",
)
#: The version of the contract that this core speaks.
API = "v1"
#: The distribution of core, whose plug-ins are there whatever is switched off by number.
CORE = "hocket"


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One plug-in as its distribution declares it."""

    kind: str
    name: str
    dist: str
    version: str
    #: ``module:attribute``.
    target: str
    #: The version of the contract that it was written for.
    api: str = API
    #: The class, for one that was registered in this process.
    obj: Any = field(default=None, compare=False, repr=False)

    def load(self) -> Any:
        """Import it. Raises BrokenPluginError if that fails, with the original error as the cause."""
        if self.obj is not None:
            return self.obj
        module, _, attribute = self.target.partition(":")
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except Exception as error:
            raise BrokenPluginError(
                f"{singular(self.kind)} '{self.name}' of {self.dist} {self.version} cannot be imported from {self.target}: "
                f"{type(error).__name__}: {error}. Install what it misses, upgrade {self.dist}, or leave '{self.name}' out."
            ) from error


def singular(kind: str) -> str:
    """``algorithm`` for ``algorithms``."""
    return {"strategies": "strategy", "actions": "actions"}.get(kind, kind.removesuffix("s"))


_registered: dict[tuple[str, str], Entry] = {}


@functools.cache
def _installed() -> tuple[Entry, ...]:
    """Every entry point of a ``hocket.*`` group, whatever version it speaks; one look at the distributions."""
    found = []
    # A distribution parses its metadata whenever it is asked for its name or version.
    known: dict[int, tuple[str, str]] = {id(None): ("unknown", "0")}
    for point in importlib_metadata.entry_points():
        if not point.group.startswith("hocket."):
            continue
        _, api, *kind = point.group.split(".")
        if api.startswith("v") and api[1:].isdigit() and len(kind) == 1:
            if point.dist is not None and id(point.dist) not in known:
                known[id(point.dist)] = point.dist.name, point.dist.version
            found.append(Entry(kind[0], point.name, *known[id(point.dist)], point.value, api))
    return tuple(sorted(found))


def refresh() -> None:
    """Forget what was seen; the next question looks at the installed distributions again."""
    _installed.cache_clear()


def entries(kind: str | None = None) -> list[Entry]:
    """Everything that is installed or registered, sorted; those that speak another version or are switched off, too."""
    return sorted(entry for entry in (*_installed(), *_registered.values()) if kind is None or entry.kind == kind)


def names(kind: str) -> list[str]:
    """Short names of the plug-ins of a kind that can be used, sorted."""
    _check_kind(kind)
    return sorted({entry.name for entry in _usable(kind)})


def get(kind: str, name: str) -> Any:
    """The class (or function) that goes by a name, or by ``distribution/name``. Imports it, and nothing else.

    Raises UnknownPluginError, AmbiguousPluginError or BrokenPluginError.
    """
    return find(kind, name).load()


def find(kind: str, name: str) -> Entry:
    """The entry that goes by a name, or by ``distribution/name``; what was registered in this process counts first."""
    _check_kind(kind)
    dist, _, short = name.rpartition("/")
    usable = [entry for entry in _usable(kind) if entry.name == short and (not dist or _same(entry.dist, dist))]
    registered = [entry for entry in usable if entry.obj is not None]
    candidates = registered or usable
    if not candidates:
        raise UnknownPluginError(_unknown(kind, name, short))
    if len(candidates) > 1:
        choices = " or ".join(f"'{entry.dist}/{entry.name}'" for entry in candidates)
        raise AmbiguousPluginError(
            f"Several distributions provide the {singular(kind)} '{name}'. Write {choices}, or uninstall one of them."
        )
    return candidates[0]


def entry_of(kind: str, cls: type) -> Entry | None:
    """The entry that declares a class, if there is one; under the module that defines it, or one that re-exports it."""

    def declares(entry: Entry) -> bool:
        module, _, attribute = entry.target.partition(":")
        return entry.obj is cls or getattr(sys.modules.get(module), attribute, None) is cls

    return next((entry for entry in entries(kind) if entry.api == API and declares(entry)), None)


def register(kind: str, name: str, cls: Any) -> None:
    """Add a plug-in for this process, before installed ones of that name. Raises PluginError if there is one already."""
    _check_kind(kind)
    if (kind, name) in _registered:
        raise PluginError(
            f"A {singular(kind)} '{name}' is registered already ({_registered[kind, name].target}). Choose another name, or "
            f"call hocket.plugins.unregister('{kind}', '{name}') first."
        )
    where = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', '')}"
    _registered[kind, name] = Entry(kind, name, "this process", "", where, API, cls)


def unregister(kind: str, name: str) -> None:
    """Undo :func:`register`. Raises UnknownPluginError if there is none of that name."""
    if _registered.pop((kind, name), None) is None:
        raise UnknownPluginError(f"No {singular(kind)} '{name}' was registered in this process.")


def _usable(kind: str) -> list[Entry]:
    allowed = switches.current()
    allowed.warn_about_unmatched(entries())
    return [entry for entry in entries(kind) if entry.api == API and allowed.permit(entry)]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginError(f"'{kind}' is not a kind of plug-in; the kinds are {', '.join(KINDS)}.")


def _same(a: str, b: str) -> bool:
    return _normal(a) == _normal(b)


def _normal(dist: str) -> str:
    return dist.lower().replace("_", "-").replace(".", "-")


def _unknown(kind: str, name: str, short: str) -> str:
    what = f"There is no {singular(kind)} '{name}'"
    for entry in entries(kind):
        if entry.name == short and entry.api != API:
            return f"{what} for this hocket: {entry.dist} {entry.version} speaks {entry.api} and this is {API}; upgrade one."
        if entry.name == short and not switches.current().permit(entry):
            return (
                f"{what}: {entry.dist} {entry.version} has it, but it is switched off by {switches.current().source}."
            )
    known = tomllib.loads((Path(__file__).parent / "known.toml").read_text()).get(kind, {})
    if short in known:
        return f"{what} installed. It comes with an extra; type: pip install 'hocket[{known[short]}]'."
    there = names(kind)
    near = _near(short, [*there, *known])
    if near in known and near not in there:
        return f"{what}. Did you mean '{near}'? It comes with an extra; type: pip install 'hocket[{known[near]}]'."
    hint = f"Did you mean '{near}'?" if near else f"Installed are: {', '.join(there) or 'none'}."
    return f"{what}. {hint} `hocket plugins list --kind {kind}` shows them all."


def _near(name: str, others: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(others), 1, 0.6)), None)
