"""The tables of what becomes of each name of Lightning, Composer, transformers and Accelerate; the data are TOML files."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

Verdict = Literal["maps", "changes", "no counterpart", "not readable"]

#: The first words of an entry in the files.
_VERDICTS: Mapping[str, Verdict] = {"maps": "maps", "changes": "changes", "none": "no counterpart"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What becomes of a name: the verdict, and what to write, with the reason if something changes."""

    verdict: Verdict
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A class of a framework: its constructor's arguments, its members, and what these return.

    ``keywords``: entries of the keyword arguments of methods. ``passes``: the kinds of the arguments of methods that a
    subclass overrides, ``first`` those of all other methods that are members.
    """

    source: str
    name: str
    symbols: tuple[str, ...]
    arguments: Mapping[str, Entry]
    members: Mapping[str, Entry]
    returns: Mapping[str, str]
    keywords: Mapping[str, Mapping[str, Entry]]
    passes: Mapping[str, tuple[str, ...]]
    first: tuple[str, ...]
    #: Whether instances have members that are not the framework's, such as those of torch.nn.Module.
    open: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A framework: its packages, public names and classes, and the namespace that replaces it, if there is one."""

    name: str
    title: str
    packages: tuple[str, ...]
    namespace: str
    imported: Entry
    #: Whether names that are not in ``symbols`` have nothing to do with training.
    others_stay: bool
    symbols: Mapping[str, Entry]
    kinds: Mapping[str, Kind]
    #: Whether the namespace replaces the whole package, so that no import of it may stay.
    whole: bool = False

    def kind_of(self, symbol: str) -> Kind | None:
        """Return the class whose instances calls of a public name return, or None."""
        return next((kind for kind in self.kinds.values() if symbol in kind.symbols), None)


@functools.cache
def sources() -> Mapping[str, Source]:
    """Return the frameworks by name.

    Example:
        >>> from hocket_migration.inspecting.tables import sources
        >>> sources()["lightning"].kinds["Trainer"].arguments["max_epochs"].text
        "duration='3ep'"
    """
    return {name: _read(name) for name in ("lightning", "composer", "transformers", "accelerate")}


def _read(name: str) -> Source:
    text = (files("hocket_migration.inspecting") / "data" / f"{name}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return Source(
        name=name,
        title=data["title"],
        packages=tuple(data["packages"]),
        namespace=data["namespace"],
        imported=_entry(data["import"]),
        others_stay=data.get("others") == "stay",
        symbols=_entries(data["symbols"]),
        kinds={kind: _kind(name, kind, its) for kind, its in data["kinds"].items()},
        whole=data.get("whole", False),
    )


def _kind(source: str, name: str, data: Mapping[str, Any]) -> Kind:
    arguments, members = _entries(data.get("arguments", {})), _entries(data.get("members", {}))
    if data.get("fields"):
        members = _fields() | members
        arguments = _fields() | arguments
    if data.get("events"):
        members = _events(name) | members
    return Kind(
        source=source,
        name=name,
        symbols=tuple(data["symbols"]),
        arguments=arguments,
        members=members,
        returns=data.get("returns", {}),
        keywords={method: _entries(each) for method, each in data.get("keywords", {}).items()},
        passes={method: tuple(each) for method, each in data.get("passes", {}).items()},
        first=tuple(data.get("first", ())),
        open=data.get("open", False),
    )


def _entries(data: Mapping[str, str]) -> dict[str, Entry]:
    return {name: _entry(text) for name, text in data.items()}


def _entry(text: str) -> Entry:
    verdict, _, rest = text.partition(": ")
    return Entry(_VERDICTS[verdict], rest)


def _fields() -> dict[str, Entry]:
    """Return the fields of `TrainingArguments`."""
    from hocket_migration.transformers.fields import FIELDS

    return {name: Entry(field.verdict, field.text) for name, field in FIELDS.items()}


def _events(kind: str) -> dict[str, Entry]:
    """Return the events of Composer that hocket has too."""
    from hocket.hookspecs import Event

    if kind == "Event":
        return {event.name: Entry("maps", f"hocket.Event.{event.name}") for event in Event}
    return {event.value: Entry("maps", f"{event.value}(state)") for event in Event}
