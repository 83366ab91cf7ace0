"""The registry: the available plug-ins by kind and name, without importing any of them."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hocket.basics.kinds import KINDS, misfit, singular as singular
from hocket.basics.plugin_errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    PluginError,
    UnknownPluginError,
    summarize,
)
from hocket.help import names as others
from hocket.help.optional_packages import NotInstalled
from hocket.help.ours import PARTS
from hocket.plugins import entry_points, switches
from hocket.plugins.entry_points import Problem, normal

#: The plug-in API version of this core.
API = "v1"
#: Roles for which "auto" may choose a plug-in declared in the entry-point group ``hocket.v1.defaults``, and their kinds.
ROLES = {"distributed-strategy": "strategies"}
_DEFAULTS = "defaults"


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One plug-in, as its distribution declares it.

    Example:
        >>> from hocket import plugins
        >>> entry = plugins.entries("schedules")[0]
        >>> entry.kind, entry.name, entry.dist
        ('schedules', 'constant', 'hocket')
    """

    kind: str
    name: str
    dist: str
    version: str
    #: ``module:attribute``.
    target: str
    #: The plug-in API version that it was written for.
    api: str = API
    #: The class, for a plug-in registered in this process.
    obj: Any = field(default=None, compare=False, repr=False)
    #: Why it cannot be used and how to fix that, or empty.
    problem: str = ""

    def load(self) -> Any:
        """Import the plug-in and return it.

        Raises BrokenPluginError if the import fails (with the original error as its cause) or finds no plug-in of this kind.
        """
        if self.obj is not None:
            return self.obj
        module, _, attribute = self.target.partition(":")
        what = f"{singular(self.kind)} '{self.name}' of {self.dist} {self.version}"
        try:
            obj = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except KeyboardInterrupt:
            raise  # pressed by the user
        except BaseException as error:  # includes SystemExit: a module that calls sys.exit must not end this process
            if isinstance(error, NotInstalled):
                raise BrokenPluginError(f"{what} needs more: {error.msg}") from error
            extra = extra_of(self.kind, self.name) if self.dist.startswith("hocket-") else None
            install = "" if extra is None else f" (type: {_install(extra)})"
            raise BrokenPluginError(
                f"{what} cannot be imported from {self.target}: {summarize(error)}. Install its missing dependencies{install}, "
                f"upgrade {self.dist}, or remove '{self.name}'."
            ) from error
        if wrong := misfit(self.kind, obj):
            raise BrokenPluginError(
                f"{what} cannot be used: its entry point names {self.target}, but {wrong}. Upgrade {self.dist}, or remove "
                f"'{self.name}'; its author has to name a class of that kind."
            )
        return obj


_registered: dict[tuple[str, str], Entry] = {}


class Registry(NamedTuple):
    """The result of one scan of the distributions."""

    entries: tuple[Entry, ...]
    #: Problems of distributions rather than of single entries.
    problems: tuple[Problem, ...]
    #: Declared defaults for a role; ``name`` is the role.
    defaults: tuple[Entry, ...] = ()


@functools.cache
def installed() -> Registry:
    """Scan the distributions once and return every entry point of a ``hocket.*`` group, of any API version."""
    declared, problems = entry_points.scan()
    scanned = sorted(entry for dist in declared for entry in _entries_of(dist))
    own = {
        (entry.kind, entry.name, entry.dist) for entry in scanned if entry.api == API
    }  # also of other versions: once
    all_entries = [entry for entry in scanned if entry.api == API or (entry.kind, entry.name, entry.dist) not in own]
    plugins = tuple(entry for entry in all_entries if entry.kind != _DEFAULTS)
    chosen = tuple(entry for entry in all_entries if entry.kind == _DEFAULTS)
    problems += [Problem(item.dist, item.version, text) for item in chosen if (text := _wrong_default(item, plugins))]
    return Registry(plugins, tuple(problems), chosen)


def _entries_of(declared: entry_points.Declared) -> Iterator[Entry]:
    name = normal(declared.dist)
    core = name in PARTS
    dist = name if core else declared.dist
    points = dict.fromkeys(declared.points)
    several = Counter((point.group, point.name) for point in points)
    for point in points:
        group = re.fullmatch(r"hocket\.(v[1-9][0-9]{0,2})\.(\w+)", point.group)
        if group is None:
            continue
        api, kind = group.groups()
        target, problem = _target(point.value)
        if several[point.group, point.name] > 1:
            problem = f"its entry_points.txt declares '{point.name}' more than once; keep one"
        elif api == API and kind not in (*KINDS, _DEFAULTS):
            problem = f"'{kind}' is not a kind of plug-in. The kinds are {', '.join(KINDS)}"
        elif not re.fullmatch(r"\w[\w.-]*", point.name):
            problem = f"{point.name!r} is not a valid name; its author has to use letters, digits and hyphens"
        elif declared.damage and not core:
            problem = declared.damage
        yield Entry(kind, point.name, dist, declared.version, target, api, problem=problem)


def _target(value: str) -> tuple[str, str]:
    """Return ``module:attribute`` without spaces and extras, and the problem with it, or empty."""
    import importlib_metadata

    match = importlib_metadata.EntryPoint.pattern.match(value)
    if match is None or not match["attr"]:
        return value, f"its entry point is {value!r}; its author has to write module:Class"
    return f"{match['module']}:{match['attr']}", ""


def _wrong_default(default: Entry, plugins: Iterable[Entry]) -> str:
    """Return the problem with a declared default, or empty."""
    if default.api != API or default.problem:
        return default.problem
    if default.name not in ROLES:
        return f"it declares a default for '{default.name}', and the roles are {', '.join(ROLES)}; correct it"
    own = {(entry.kind, entry.target) for entry in plugins if entry.dist == default.dist}
    if (ROLES[default.name], default.target) not in own:
        return f"its default '{default.name}' names {default.target}, which is not one of its {ROLES[default.name]}; correct it"
    return ""


def refresh() -> None:
    """Clear the cache, so that the next lookup scans the installed distributions again.

    Example:
        >>> from hocket import plugins
        >>> plugins.refresh()  # after installing a package in a notebook
    """
    installed.cache_clear()


def entries(kind: str | None = None) -> list[Entry]:
    """Return all installed and registered plug-ins, sorted, including disabled ones and those of another API version.

    Example:
        >>> from hocket import plugins
        >>> [entry.name for entry in plugins.entries("devices") if entry.dist == "hocket"]
        ['cpu', 'cuda', 'mps', 'xla']
    """
    return sorted(
        entry for entry in (*installed().entries, *_registered.values()) if kind is None or entry.kind == kind
    )


def distinct(names: Iterable[str]) -> list[str]:
    """Return the names of plug-ins in one run, which are unique: the second of a name is ``name-2``."""
    unique: list[str] = []
    for given in names:
        name, number = given, 1
        while name in unique:
            number += 1
            name = f"{given}-{number}"
        unique.append(name)
    return unique


def names(kind: str) -> list[str]:
    """Return the short names of the usable plug-ins of a kind, sorted.

    Example:
        >>> from hocket import plugins
        >>> "early-stopping" in plugins.names("callbacks")
        True
    """
    _check_kind(kind)
    return sorted({entry.name for entry in _usable(entries(kind))})


def get(kind: str, name: str) -> Any:
    """Import and return the class (or function) with this name, or with ``distribution/name``. Imports no other plug-in.

    Raises UnknownPluginError, AmbiguousPluginError or BrokenPluginError.

    Example:
        >>> from hocket import plugins
        >>> plugins.get("callbacks", "early-stopping")
        <class 'hocket_insight.callbacks.early_stopping.EarlyStopping'>
    """
    return find(kind, name).load()


def find(kind: str, name: str) -> Entry:
    """Return the entry with this name, or with ``distribution/name``. Entries registered in this process take precedence."""
    _check_kind(kind)
    dist, _, short = name.rpartition("/")
    meant = PARTS.keys() if normal(dist) == "hocket" else {normal(dist)}
    named = [
        entry
        for entry in entries(kind)
        if (entry.name == short and (not dist or normal(entry.dist) in meant)) or (entry.problem and entry.name == name)
    ]
    usable = _usable(named)
    registered = [entry for entry in usable if entry.obj is not None]
    if not dist and any(entry.dist in PARTS for entry in named):  # a short name of core always means core's plug-in
        usable = [entry for entry in usable if entry.dist in PARTS]
    candidates = registered or usable
    if not candidates:
        if broken := next((entry for entry in named if entry.problem), None):
            raise BrokenPluginError(
                f"{singular(kind)} '{broken.name}' of {broken.dist} {broken.version} cannot be used: {broken.problem}."
            )
        raise UnknownPluginError(_unknown(kind, name, short))
    if len(candidates) > 1:
        choices = " or ".join(f"'{entry.dist}/{entry.name}'" for entry in candidates)
        raise AmbiguousPluginError(
            f"Several distributions provide the {singular(kind)} '{name}'. Write {choices}, or uninstall one of them."
        )
    return candidates[0]


def entry_of(kind: str, cls: type) -> Entry | None:
    """Return the entry that declares a class, or None; the entry may name the defining module or one that re-exports it.

    If several entries declare the class, prefer a registered one, then one of the package that defines the class.
    """

    def declares(entry: Entry) -> bool:
        if entry.obj is not None:
            return entry.obj is cls
        module, _, attribute = entry.target.partition(":")
        try:
            return getattr(sys.modules.get(module), attribute, None) is cls
        except Exception:  # from a module-level __getattr__
            return False

    own = cls.__module__.partition(".")[0].replace("_", "-")
    matches = [entry for entry in entries(kind) if entry.api == API and not entry.problem and declares(entry)]
    return min(
        matches,
        key=lambda entry: (entry.obj is None, normal(entry.dist) != own, entry.dist not in PARTS, entry),
        default=None,
    )


def register(kind: str, name: str, cls: Any) -> None:
    """Add a plug-in for this process, with precedence over installed ones. Raises PluginError if the name is registered.

    Example:
        >>> import hocket, torch
        >>> class Quiet(hocket.Callback):
        ...     pass
        >>> hocket.plugins.register("callbacks", "quiet", Quiet)
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), callbacks=["quiet"], device="cpu")
    """
    _check_kind(kind)
    if (kind, name) in _registered:
        raise PluginError(
            f"A {singular(kind)} '{name}' is already registered ({_registered[kind, name].target}). Choose another name, or "
            f"call hocket.plugins.unregister('{kind}', '{name}') first."
        )
    if wrong := misfit(kind, cls):
        raise PluginError(f"{cls!r} cannot be registered as {singular(kind)} '{name}': {wrong}.")
    where = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', '')}"
    _registered[kind, name] = Entry(kind, name, "this process", "", where, API, cls)


def unregister(kind: str, name: str) -> None:
    """Remove a plug-in that was added by :func:`register`. Raises UnknownPluginError if none of that name was registered.

    Example:
        >>> import hocket
        >>> hocket.plugins.register("callbacks", "temporary", hocket.Callback)
        >>> hocket.plugins.unregister("callbacks", "temporary")
    """
    if _registered.pop((kind, name), None) is None:
        raise UnknownPluginError(f"No {singular(kind)} '{name}' was registered in this process.")


def choices(kind: str) -> list[Entry]:
    """Return the usable plug-ins that "auto" may choose from, without those that reuse a name of core."""
    usable = _usable(entries(kind))
    own = {entry.name for entry in usable if entry.dist in PARTS}
    return [entry for entry in usable if entry.dist in PARTS or entry.name not in own]


def defaults(role: str) -> list[Entry]:
    """Return the usable plug-ins declared as the default for a role (one of `ROLES`). Imports nothing."""
    declared = {
        (entry.dist, entry.target)
        for entry in installed().defaults
        if entry.name == role and entry.api == API and not entry.problem
    }
    return [entry for entry in choices(ROLES[role]) if (entry.dist, entry.target) in declared]


def another_api(entry: Entry) -> str:
    """Return why an entry of another API version cannot be used, and what to do; empty for one of this API version."""
    if entry.api == API:
        return ""
    later = int(entry.api[1:]) > int(API[1:])
    remedy = f"upgrade hocket, or install an earlier {entry.dist}" if later else f"upgrade {entry.dist}"
    return f"has plug-in API {entry.api}, {'later' if later else 'earlier'} than {API} of this hocket; {remedy}"


def extra_of(kind: str, name: str) -> str | None:
    """Return the extra of hocket that installs a plug-in (for kind ``"defaults"``, a role's default), or None."""
    extra: str | None = known().get(kind, {}).get(name)
    return extra


@functools.cache
def known() -> dict[str, dict[str, str]]:
    """Return the plug-ins of hocket's packages by kind, whether installed or not: the extra that brings each name."""
    import tomllib  # only needed for error messages

    return tomllib.loads((Path(__file__).parent / "known.toml").read_text())


def _usable(among: Iterable[Entry]) -> list[Entry]:
    allowed = switches.current()
    allowed.warn_about_unmatched(entries())
    return [entry for entry in among if entry.api == API and not entry.problem and allowed.permit(entry)]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginError(f"'{kind}' is not a kind of plug-in. The kinds are {', '.join(KINDS)}.")


#: The kinds that a Trainer takes as lists.
_LISTS = ("algorithms", "callbacks", "loggers")
#: The kinds of which a Trainer takes one, in an argument of the singular.
_SINGLE = ("optimizers", "schedules", "precisions", "strategies", "devices")


def _unknown(kind: str, name: str, short: str) -> str:
    what = f"There is no {singular(kind)} '{name}'"
    for entry in entries(kind):
        if entry.name == short and entry.api != API:
            return f"{what} for this hocket: {entry.dist} {entry.version} {another_api(entry)}."
        if entry.name == short and not switches.current().permit(entry):
            return f"{what}: {entry.dist} {entry.version} provides it, but {switches.current().source} disables it."
    uninstalled = known().get(kind, {})
    if short in uninstalled:
        return f"{what} installed. Type: {_install(uninstalled[short])}"
    usable = names(kind)
    module, dot, attribute = name.rpartition(".")
    if dot and ":" not in name and name.replace(".", "").isidentifier():
        return (
            f"{what}. In YAML the path of a class has a colon: '{module}:{attribute}'. In Python pass the class itself."
        )
    if text := others.elsewhere(kind, short):
        return f"{what}. {text}."
    if other := next((group for group in (*_LISTS, *_SINGLE) if group != kind and short in names(group)), None):
        write = f"«{other}=['{short}']»" if other in _LISTS else f"«{singular(other)}='{short}'»"
        return f"{what}. It is one of the {other} here: write {write}."
    near = others.alias(kind, short, [*usable, *uninstalled]) or others.closest(short, [*usable, *uninstalled])
    if near in uninstalled and near not in usable:
        return f"{what}. Did you mean '{near}'? It is not installed; type: {_install(uninstalled[near])}"
    write = f" Write «{singular(kind)}='{near}'»." if kind in ("precisions", "strategies", "devices") else ""
    hint = f"Did you mean '{near}'?{write} Installed:" if near else "Write one of the installed:"
    return f"{what}. {hint} {', '.join(usable) or 'none'} (`hocket plugins list --kind {kind}`)."


def _install(extra: str) -> str:
    from hocket.help import installing  # only needed for error messages

    return installing.command(extra)
