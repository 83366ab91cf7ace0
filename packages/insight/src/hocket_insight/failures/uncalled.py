"""Methods of a user's class that hocket never calls, although another library does, or a similar name would be called."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import CodeType

from hocket.help import names
from hocket.help.ours import is_ours


def uncalled(cls: type, base: type, events: Collection[str] = ()) -> str:
    """Return which methods of a class are meant for a caller that does not exist, and what to write; or empty.

    These are methods by the names of other libraries, and misspellings of methods of ``base``. Methods that other methods of
    the class use are helpers.

    Args:
        cls: a subclass of ``base``; only it and its bases below ``base`` are examined.
        events: names of methods that are called although ``base`` does not define them.
    """
    own = [ancestor for ancestor in cls.__mro__ if issubclass(ancestor, base) and not is_ours(ancestor.__module__)]
    methods = {name: item for kind in reversed(own) for name, item in vars(kind).items() if inspect.isfunction(item)}
    unknown = {
        name: write
        for name in methods
        if name[0] != "_" and not hasattr(base, name) and (write := _called_here(name, base, events))
    }
    used = {name for method, body in methods.items() if method not in unknown for name in _names_in(body.__code__)}
    listed = {name: write for name, write in unknown.items() if name not in used}
    if not listed:
        return ""
    instead = "; ".join(f"instead of {name}: {write}" for name, write in listed.items())
    return f"{cls.__name__} defines {', '.join(listed)}, which hocket never calls. Write {instead}."


def _called_here(name: str, base: type, events: Collection[str]) -> str | None:
    """Return what to define instead of a method by another library's name or with a typo, or None for other names."""
    if name in events:
        return None
    if text := names.listed(name, "methods", base.__name__):
        return text
    hook = names.hook(name) if name.startswith("on_") or name.endswith(("_begin", "_end", "_start")) else None
    if event := hook or names.closest(name, events, 0.85):
        return f"{event}(self, state), here or in a hocket.Callback"
    methods = {key: method for key, method in vars(base).items() if key[0] != "_" and inspect.isfunction(method)}
    near = names.closest(name, methods, 0.85)
    return f"{near}({', '.join(inspect.signature(methods[near]).parameters)})" if near else None


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
