"""A page for each plug-in: how it is written, what it declares, what it costs, what it was tested with and what it gives."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

from api import documentation, ours, places, plugin_page
from evidence.pages import BEGIN, END, _block
from markup import ROOT, code, document, link, link_between, page, plain, table
from page import HEADS, REASONS

import hocket
from hocket.basics.kinds import KINDS
from hocket.help.ours import is_ours
from hocket.plugins import Entry, registry
from hocket_cli.document import flow
from hocket_cli.keys import KIND_OF_KEY, LISTS
from hocket_cli.plugin_summaries import summary
from hocket_cli.plugins import declared
from hocket_testkit import examples

CARDS = document("algorithms/matrix.md").parent


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by name."""
    found, sections = {}, []
    for kind in KINDS:
        entries = [entry for entry in ours() if entry.kind == kind]
        rows = [[entry, plain(summary(entry)), code(entry.dist)] for entry in entries]
        if kind != "commands":  # which have pages of their own
            found |= {plugin_page(entry): _page(entry, folder) for entry in entries}
        index = f"plugins/{kind}/index"
        shown = [[f"[{each.name}]({link_between(index, plugin_page(each))})", *others] for each, *others in rows]
        opening = f"Look up here which {kind} hocket has, and what each does."
        if kind != "commands":
            found[index] = page(
                {"shards": "Data formats"}.get(kind, kind.capitalize()),
                opening,
                table(["name", "what it does", "distribution"], shown),
            )
        to = "../commands/index" if kind == "commands" else f"{kind}/index"
        sections.append([f"[{kind}]({to}.md)", str(len(entries)), ", ".join(entry.name for entry in entries)])
    opening = "Look up here what can be attached to a run by its name, and what each plug-in does, needs and costs."
    return found | {"plugins/index": page("Plug-ins", opening, table(["kind", "number", "names"], sections))}


def _page(entry: Entry, folder: Path) -> str:
    plugin, name = entry.load(), plugin_page(entry)
    what = registry.singular(entry.kind)
    extra = registry.extra_of(entry.kind, entry.name)
    rows = [
        ["kind", what],
        ["write", code(_written(entry))],
        ["distribution", f"{code(entry.dist)}, of the extra {code(extra)}" if extra else code(entry.dist)],
        ["defined in", code(entry.target)],
        *([label, _linked(label, names)] for label, names in declared(plugin).items()),
    ]
    place = places().get(id(plugin))
    path = place.path if place and place.page == name else entry.target.replace(":", ".")
    if is_ours(getattr(plugin, "__module__", "")) and (place is None or place.page == name):
        described = documentation(path, plugin)
    elif place is not None:
        described = f"Its arguments are those of {{py:obj}}`{place.path}`."
    else:
        described = f"```text\n{path}{_call(plugin)}\n```"
    card = CARDS / f"{entry.name}.md" if entry.kind == "algorithms" else None
    return page(
        entry.name,
        f"Look up here how to write the {what} `{entry.name}`, and what it does, needs and costs. {plain(summary(entry))}",
        table(["", ""], rows),
        f"When to use it, and what others have measured: [its card]({link(card, folder, name)})." if card else "",
        "## Arguments",
        described,
        _section(card, "Cost", folder, name) if card else "",
        _matrix(entry, folder, name) if card else "",
        _evidence(entry, card, folder, name),
    )


def _call(plugin: Any) -> str:
    """Return a signature with a line for each argument."""
    lines, before = [], None
    for each in inspect.signature(plugin).parameters.values():
        if each.kind is each.KEYWORD_ONLY and before not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            lines.append("*")
        lines.append(str(each))
        before = each.kind
    return "".join(["(\n", *(f"    {line},\n" for line in lines), ")"])


def _written(entry: Entry) -> str:
    if entry.kind == "shards":
        return f"train_data: {{hocket_streaming:stream: {{path: …, format: {entry.name}}}}}"
    key = next(key for key, kind in KIND_OF_KEY.items() if kind == entry.kind)
    arguments = _arguments(entry)
    value = flow({entry.name: arguments}) if arguments else entry.name
    return f"{key}: [{value}]" if key in LISTS else f"{key}: {value}"


def _arguments(entry: Entry) -> dict[str, Any]:
    """Return the arguments of a plug-in that requires some, as its docstring's example has them; … for what YAML has not."""
    plugin = entry.load()
    parameters = [*inspect.signature(plugin).parameters.values()][entry.kind == "optimizers" :]  # the first: parameters
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if not required:
        return {}
    _, call = examples._call(plugin) or (None, ast.Call(ast.Name(""), [], []))
    given = dict(zip([each.name for each in parameters], call.args[entry.kind == "optimizers" :], strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg}
    found = {}
    for name in dict.fromkeys((*required, *given)):
        try:
            found[name] = ast.literal_eval(given[name])
        except (KeyError, ValueError):  # shown by no example, or made by it
            if name in required:
                found[name] = "…"
    return found


def _linked(label: str, names: str) -> str:
    if label == "events":  # in the order of a run
        names = ", ".join(each.value for each in hocket.Event if each.value in names.split(", "))
    return ", ".join(map(code, names.split(", ")))


def _section(card: Path, heading: str, folder: Path, name: str) -> str:
    """Return a section of a method's card, with the addresses of its links as this page needs them."""
    found = re.search(
        rf"^## {heading}\n.*?(?=^## |^<!-- |\Z)", card.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return _moved(found[0], card, folder, name) if found else ""


def _moved(text: str, card: Path, folder: Path, name: str) -> str:
    def address(match: re.Match[str]) -> str:
        target, hash_, anchor = match[1].partition("#")
        file = (card.parent / target).resolve() if target else card
        return f"]({link(file, folder, name)}{hash_}{anchor})"

    return re.sub(r"\]\((?!\w+:)([^)]*)\)", address, text).strip()


def _matrix(entry: Entry, folder: Path, name: str) -> str:
    """Return what an algorithm was tested together with."""
    reasons = REASONS.get(entry.name, {})
    rows = [[head, f"no: {plain(reasons[column])}" if column in reasons else "✓"] for column, head in HEADS.items()]
    about = f"[What each column means]({link(CARDS / 'matrix.md', folder, name)})."
    return f"## Combinations\n\n{about}\n\n{table(['with', 'same weights'], rows)}"


def _evidence(entry: Entry, card: Path | None, folder: Path, name: str) -> str:
    """Return the tables of what a plug-in was measured to give; empty if it was not measured."""
    if card:
        block = re.search(rf"{BEGIN}\n(.*?){END}", card.read_text(encoding="utf-8"), re.DOTALL)
        return _moved(block[1], card, folder, name) if block else ""
    rows = {row: each for row, each in _measured()["rows"].items() if entry.kind == "optimizers" and row == entry.name}
    return _moved(_block(rows, _measured()), CARDS / "index.md", folder, name) if rows else ""


@functools.cache
def _measured() -> dict[str, Any]:
    results: dict[str, Any] = json.loads((ROOT / "docs/evidence/results.json").read_text(encoding="utf-8"))
    return results
