"""What becomes of a name: the entry of the tables, or what is said of names that they do not have."""

from __future__ import annotations

import ast
import dataclasses
import re

from hocket_migration.inspecting import drop_in
from hocket_migration.inspecting.names import Module, Symbol
from hocket_migration.inspecting.tables import Entry, Source


def of_symbol(found: Symbol) -> Entry | None:
    """Return the entry of a public name."""
    entry = found.source.symbols.get(found.name) or functional(found.source, found.name)
    if entry is not None:
        return entry
    if found.source.whole and not drop_in.lacks(found):
        return in_drop_in(found.source)
    return unlisted(found.source, found.dotted, found.name)


def of_end(source: Source, dotted: str, name: str) -> Entry | None:
    """Return the entry of what may be a module or a function."""
    near = functional(source, name) or source.symbols.get(name) or source.symbols.get(dotted.rpartition(".")[2])
    if near is None and source.whole and not drop_in.lacks(Module(source, f"{dotted}.{name}")):
        return in_drop_in(source)
    return near or unlisted(source, dotted, name)


def of_import(source: Source, dotted: str, name: str) -> Entry | None:
    """Return the entry of what ``from dotted import name`` imports, if it is not a public name."""
    near = source.symbols.get(name) or source.symbols.get(dotted.rpartition(".")[2])
    if near is None and source.others_stay and (trains(dotted) or not trains(name)):
        return unlisted(source, dotted, name)
    if near is None and source.whole and drop_in.lacks(Module(source, f"{dotted}.{name}")):
        return unknown(source, name)
    if near is None and not source.namespace and dotted != name:
        return unknown(source, name)
    return near or source.imported


def functional(source: Source, name: str) -> Entry | None:
    """Return the entry of a functional form of Composer, such as apply_blurpool."""
    if source.name != "composer" or not name.startswith(
        ("apply_", "augmix_", "colout_", "cutmix_", "cutout_", "mixup_")
    ):
        return None
    plain = name.removeprefix("apply_").partition("_")[0]
    return Entry(
        "changes", f"algorithms=['{plain}']: algorithms act when the Trainer is made, and are recorded in checkpoints"
    )


#: What an argument becomes, up to its number: ``duration='3ep'``, ``clip_gradients=1.0``.
_NUMBER = re.compile(r"(\w+=)(?:'(?P<count>\d+)(?P<unit>[a-z]+)'|(?P<number>\d+(?:\.\d+)?)(?![\w.]))")


def with_value(entry: Entry, argument: ast.expr) -> Entry:
    """Return an entry with the argument's own number in place of the example's, where it is a literal of the same kind."""
    found = _NUMBER.match(entry.text)
    value = argument.value if isinstance(argument, ast.Constant) else None
    if found is None or entry.verdict == "no counterpart":
        return entry
    if found["count"] is None:
        kinds = (int, float) if "." in found["number"] else (int,)
        text = str(value) if type(value) in kinds else found["number"]
    elif isinstance(value, str) and re.fullmatch(r"\d+(ep|ba|sp|tok)", value):  # a time of Composer
        text = f"'{value}'"
    else:
        text = f"'{value if type(value) is int else found['count']}{found['unit']}'"
    return dataclasses.replace(entry, text=found[1] + text + entry.text[found.end() :])


def unknown(source: Source, name: str) -> Entry:
    return Entry(
        "no counterpart",
        f"{name} of {source.title} is not in the tables; docs/reference/other-trainers.md has what hocket offers",
    )


def in_drop_in(source: Source) -> Entry:
    return Entry("changes", f"stays in {source.namespace}; hocket.Trainer's are in docs/reference/other-trainers.md")


def unlisted(source: Source, dotted: str, name: str) -> Entry | None:
    """Return the entry of a name that is not in the tables: None if it has nothing to do with training."""
    return None if source.others_stay and not trains(dotted) else unknown(source, name)


def trains(dotted: str) -> bool:
    return any(part in dotted for part in ("trainer", "training_args", "integrations"))


def unread(expression: str) -> Entry:
    if len(expression) > 40:
        expression = f"{expression[:39]}…"
    return Entry(
        "not readable", f"the arguments in {expression} are known only when the program runs: compare their names"
    )


def star(source: Source) -> Entry:
    return Entry("changes", f"names of {source.title} are followed, as far as they are known: import them by name")
