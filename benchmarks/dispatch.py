"""What a hook costs: the bus's compiled functions against pluggy called directly (4)."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pluggy
from harness import Series, table

import hocket
from hocket.hookspecs import SPECS, Event
from hocket.hookspecs.attachment import Attachment
from hocket.plugins.bus import Bus

NUMBER = 20_000


class Listener(hocket.Callback):
    """Listens to batch_end."""

    @hocket.hookimpl
    def batch_end(self, state: Any) -> None:
        """Nothing."""


class Default:
    """Answers an action."""

    @hocket.hookimpl
    def zero_grad(self, state: Any) -> bool:
        """At once."""
        return True


class Wrapper(hocket.Callback):
    """Surrounds an action."""

    @hocket.hookimpl(wrapper=True)
    def zero_grad(self, state: Any) -> Any:
        """With nothing."""
        return (yield)


def run(repeats: int) -> dict[str, Any]:
    """Microseconds per call."""
    plugins: dict[str, list[tuple[str, Any]]] = {
        "a silent event": [],
        "an event with 1 listener": [("callbacks", Listener())],
        "an event with 5 listeners": [("callbacks", Listener()) for _ in range(5)],
        "an event with 20 listeners": [("callbacks", Listener()) for _ in range(20)],
        "an action, default only": [("actions", Default())],
        "a wrapped action": [("actions", Default()), ("callbacks", Wrapper())],
    }
    rows = [["µs per call", "hocket's bus", "pluggy"]]
    values: dict[str, dict[str, list[float]]] = {}
    for case, attached in plugins.items():
        hook = "zero_grad" if "action" in case else Event.BATCH_END.value
        ours, theirs = _bus(hook, attached), _pluggy(hook, attached)
        mine, direct = Series(), Series()
        for _ in range(repeats):
            mine.values.append(timeit.timeit(lambda call=ours: call(None), number=NUMBER) / NUMBER * 1e6)
            direct.values.append(timeit.timeit(lambda call=theirs: call(state=None), number=NUMBER) / NUMBER * 1e6)
        values[case] = {"hocket": mine.values, "pluggy": direct.values}
        rows.append([case, str(mine), str(direct)])
    return {"us": values, "table": table(rows)}


def _bus(hook: str, attached: list[tuple[str, Any]]) -> Callable[..., Any]:
    bus = Bus([Attachment(kind, f"p{index}", plugin) for index, (kind, plugin) in enumerate(attached)])
    return getattr(bus, hook)


def _pluggy(hook: str, attached: list[tuple[str, Any]]) -> Callable[..., Any]:
    manager = pluggy.PluginManager("hocket")
    for spec in SPECS:
        manager.add_hookspecs(spec)
    for _, plugin in attached:
        manager.register(plugin)
    return getattr(manager.hook, hook)
