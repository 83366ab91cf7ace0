"""The index of all pages."""

from __future__ import annotations

from collections.abc import Sequence

from markup import page, table


def pages(families: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the page by its name: a line for each page that is not below the index of a family."""
    found = {name: text for family in families for name, text in family.items()}
    tops = [name for name in found if "/" not in name or (name.endswith("/index") and name.count("/") == 1)]
    rows = []
    for name in tops:
        title, opening = found[name].split("\n\n")[:2]
        rows.append([f"[{title.removeprefix('# ')}]({name}.md)", opening.removeprefix("Look up here ")])
    opening = "Look up here anything that has a name. These pages are written from the installed packages."
    return {"index": page("Look up a name", opening, table(["page", "look up"], rows))}
