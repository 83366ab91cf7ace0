"""Count what the calls of a bus cost: the work of each plug-in on each hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hocket.hookspecs.bus import BusLike


class Timer:
    """Wraps the functions that a bus calls, such that they add up their calls and seconds in its ``account`` and ``work``."""

    def __init__(self, bus: BusLike) -> None:
        self._bus = bus
        #: Whether a plug-in measures now, and what it marks each call with; see `hocket.hookspecs.bus.BusLike.measure`.
        self.measuring = False
        self.ranges: Callable[[str], AbstractContextManager[Any]] | None = None
        #: Seconds spent in nested calls so far, for each function being timed, outermost first.
        self._nested_seconds: list[float] = []

    def timed(self, function: Callable[..., Any], hook: str, plugin: str, transparent: bool) -> Callable[..., Any]:
        """Time an implementation of a hook if costs are counted, and mark its calls if there are ranges.

        Args:
            transparent: whether its errors, and so its work, are those of the run and not of a plug-in.
        """
        if not (self._bus.profile or self.measuring):
            return function
        if self.ranges is not None:
            function = _in_range(function, self.ranges, hook if transparent else f"{plugin}.{hook}")
        if transparent and not self.measuring:
            return self._timed(function, None)
        entries = self._bus.work if transparent else self._bus.account
        return self._timed(function, entries.setdefault((plugin, hook), [0, 0.0, 0.0]))

    def without_closure(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Exclude the loop's closure, the argument at ``index``, from the time of the plug-in that calls it."""
        if not (self._bus.profile or self.measuring):
            return function

        def call(*args: Any) -> Any:
            return function(*args[:index], self._timed(args[index], None), *args[index + 1 :])

        return call

    def _timed(self, function: Callable[..., Any], entry: list[float] | None) -> Callable[..., Any]:
        """Time the function, and add to ``entry`` its own seconds and those of the timed functions that it calls."""
        clock, nested = time.perf_counter, self._nested_seconds

        def timed(*args: object) -> Any:
            begin = clock()
            nested.append(0.0)
            try:
                return function(*args)
            finally:
                took, others = clock() - begin, nested.pop()
                if entry is not None:
                    entry[0] += 1
                    entry[1] += took - others
                    entry[2] += others
                if nested:
                    nested[-1] += took

        return timed


def _in_range(
    function: Callable[..., Any], ranges: Callable[[str], AbstractContextManager[Any]], name: str
) -> Callable[..., Any]:
    def call(*args: object) -> Any:
        with ranges(name):
            return function(*args)

    return call
