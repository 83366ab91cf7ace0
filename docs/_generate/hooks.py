"""The page of every event, action and other hook, in the order in which a run calls them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from api import ours, plugin_page
from markup import directive, document, link, page, plain, table

from hocket.hookspecs import SPECS
from hocket.plugins import Entry


def pages(folder: Path) -> dict[str, str]:
    """Return the page by its name."""
    opening = (
        "Look up here when each hook is called, what it gets, whose result counts and which plug-ins implement it."
    )
    order = f"[Events, in order]({link(document('events.md'), folder, 'hooks')}) shows a complete run."
    return {"hooks": page("Hooks", opening, order, *map(_section, SPECS))}


def _section(spec: type) -> str:
    rows = []
    for name, hook in vars(spec).items():
        if name[0] != "_":
            counts = "the first result" if hook.hocket_spec["firstresult"] else "none; all are called"
            users = ", ".join(f"[{entry.name}]({plugin_page(entry)}.md)" for entry in _implementing(name))
            rows.append([f"{{py:meth}}`~hocket.hookspecs.{spec.__name__}.{name}`", counts, users])
    described = plain((sys.modules[spec.__module__].__doc__ or "").strip().partition("\n\n")[0])
    return "\n\n".join(
        [
            f"## {spec.__name__}",
            directive("py:module", spec.__module__),
            described,
            table(["hook", "whose result counts", "implemented by"], rows),
            directive("autoclass", f"hocket.hookspecs.{spec.__name__}", "members:", "member-order: bysource"),
        ]
    )


def _implementing(hook: str) -> list[Entry]:
    """Return the plug-ins that act on an event, or define a hook."""
    found = []
    for entry in ours():
        plugin = entry.load()
        events = {event.value for event in getattr(plugin, "events", ())}
        if hook in events or (inspect.isclass(plugin) and hook in vars(plugin)):
            found.append(entry)
    return found
