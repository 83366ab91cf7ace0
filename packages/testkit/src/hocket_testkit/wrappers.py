"""Whether wrappers of actions return what they wrap returned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hocket.hookspecs import Actions


def watch_wrappers(plugin: Any) -> set[str]:
    """Replace the wrappers of actions of a plug-in; return a set that gets the name of each that loses a result."""
    losing: set[str] = set()
    for name in (each for each in vars(Actions) if not each.startswith("_")):
        function = getattr(plugin, name, None)
        options = getattr(function, "hocket_impl", None) or {}
        if function is not None and options.get("wrapper"):
            tell = functools.partial(losing.add, f"{type(plugin).__name__}.{name}")
            setattr(plugin, name, _watched(function, tell))
    return losing


def _watched(function: Callable[..., Any], lost: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        generator = function(*args, **kwargs)
        next(generator)
        try:
            result = yield
        except BaseException as error:
            try:
                generator.throw(error)
            except StopIteration as stop:
                return stop.value
            return None
        try:
            generator.send(result)
        except StopIteration as stop:
            if result is not None and stop.value is None:
                lost()
            return stop.value

    return call
