"""Methods and attributes of other libraries: what to write here instead."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from typing import Any

from hocket.help import names


def missing(owner: str, name: str, obj: Any) -> str:
    """Return the message for an attribute that does not exist: what other libraries mean by it, or a similar name."""
    if name.startswith("_"):  # dir() itself looks for some
        return f"{owner} has no {name!r}."
    there = [each for each in dir(obj) if each[0] != "_"]
    found = instead(owner, name, there)
    return f"{owner} has no {name!r}; it has {', '.join(there)}. {found}".rstrip()


def explain(error: BaseException) -> None:
    """Add a note to an AttributeError of the State: ``__getattr__`` would slow down each access to it in a step."""
    obj = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and error.name and type(obj).__qualname__ == "State":
        text = missing("State", error.name, obj)
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


def instead(owner: str, name: str, there: Iterable[str]) -> str:
    """Return what to write instead of a name of another library, or a similar name, or empty."""
    if text := names.listed(name, "attributes", owner):
        return f"Write {text}."
    near = difflib.get_close_matches(name, there, 1, 0.6)
    return f"Did you mean '{near[0]}'?" if near else ""


class Values(dict[str, float]):
    """Values by name, such as ``eval/loss``, that lists the names if one does not exist."""

    def __missing__(self, name: Any) -> float:
        near = difflib.get_close_matches(str(name), self, 1, 0.5)
        raise KeyError(
            f"There is no value {name!r}; there is {', '.join(map(repr, self)) or 'none, without an evaluation'}. "
            f"Write {near[0] if near else next(iter(self), 'eval/loss')!r}; evaluation sets are named by "
            f"eval_data={{'val': loader}}."
        )


class Named(enum.EnumMeta):
    """The metaclass of enumerations that suggest a member for a name that does not exist."""

    def __getattr__(cls, name: str) -> Any:
        members = type.__getattribute__(cls, "__dict__").get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(name if name.startswith("_") else unknown_member(cls, name))

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise KeyError(unknown_member(cls, str(name))) from None


def unknown_member(cls: Any, name: str) -> str:
    """Return the message for a member of an enumeration that does not exist."""
    members = list(cls.__members__)
    wanted = name.upper()
    known = names.hook(name.lower()) if cls.__name__ == "Event" else None
    near = [known.upper()] if known and known.upper() in members else difflib.get_close_matches(wanted, members, 1, 0.5)
    hint = f"Write {cls.__name__}.{near[0]}. " if near else f"Write {cls.__name__}.{members[0]}, for instance. "
    return f"{cls.__name__} has no member {name!r}. {hint}The members are {', '.join(members)}."
