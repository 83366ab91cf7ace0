"""A configuration file with its overrides: ``key=value`` on the command line, at any depth."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from hocket.basics.masking import is_masked, masked
from hocket.errors import Setting
from hocket.help import names
from hocket.plugins import PluginConfigError, registry
from hocket_cli import forms, recorded_config
from hocket_cli.document import ConfigError, Node, flow, parse_value, read, suggestion
from hocket_cli.imports import reference
from hocket_cli.keys import KIND_OF_KEY, LISTS, keys
from hocket_cli.recorded_config import VARIABLE, Source
from hocket_cli.yaml_messages import key_of, spelled

#: A part of the key of an override, perhaps in quotes.
_PART = r'(?:"[^"]*"|[^".=]*)'


def configuration(args: argparse.Namespace) -> Node:
    """Return the file with its overrides applied, and its keys checked."""
    return source(args).document


def source(args: argparse.Namespace) -> Source:
    """Return what a command reads: a file, or the run ``args.run`` or ``args.source``; then overrides."""
    repeats, file, changes = getattr(args, "source", None), args.config, list(args.changes)
    recorded = repeats or getattr(args, "run", None)
    if repeats is not None and file is not None:
        if "=" not in file:
            raise PluginConfigError(
                f"--from {repeats} has its own configuration, so {file} is one too many. Remove one of them."
            )
        file, changes = None, [file, *changes]
    if file is None and recorded is None:
        raise PluginConfigError(
            "Name a configuration file, such as config.yaml. `hocket train --print-config > config.yaml` writes one with "
            "every key."
        )
    made: dict[str, Any] = {}
    if recorded is None:
        document = read(file, keep=recorded_config.KEY)
        made = recorded_config.made_of(document, Path(file).parent)
        if not {"parameters", "config"} - document.value.keys():
            raise ConfigError(
                file,
                f"It describes a sweep, and no single run. Write `hocket sweep {shlex.quote(file)}`, or give the configuration "
                f"that it names: {document.value['config'].plain()}.",
            )
    else:
        document, made, where = recorded_config.read(recorded)
        if repeats is None:
            file = where
        else:
            recorded_config.as_new_run(document, made, repeats)
    environment = of_environment()
    for change in environment:
        override(document, change, f"'{without_secrets(change)}' in {VARIABLE}")
    for change, following in zip(changes, [*changes[1:], "="], strict=False):
        if change[-1:] == "=" and change != "=" and "=" in following[1:] + following[-1:]:
            raise ConfigError(
                f"'{change}'", f"An override is key=value, and there is no value. Write {change}VALUE, or {change}null."
            )
    for change, before in zip(changes, ["=", *changes], strict=False):
        if change[:1] == "=" and "=" in before:
            raise ConfigError(
                f"'{change}'",
                f"An override is key=value, and there is no key. Write one first, such as seed={change[1:] or 3}.",
            )
    if any(each[:1] == "=" or each[-1:] == "=" for each in changes):
        joined = re.sub(r" ?= ?", "=", " ".join(changes))
        raise ConfigError(f"'{' '.join(changes)}'", f"An override is key=value, without spaces. Write {joined}.")
    given = [split(change)[0] for change in changes]
    twice = next((key for key in given if given.count(key) > 1), None)
    if twice is not None and not getattr(args, "trial", None):  # a sweep's own values come last
        raise ConfigError(
            f"'{twice}=…'", "This override is given twice, and one value would have no effect. Remove one."
        )
    for change in changes:
        override(document, change, getattr(args, "words", {}).get(change, ""))
    if repeats is not None and not any(re.match(r"checkpoints(\.folder)?=", each) for each in [*environment, *changes]):
        recorded_config.own_checkpoints(document, f"--from {repeats}")
    check_keys(document)
    environment, changes = (list(map(without_secrets, each)) for each in (environment, changes))
    return Source(document, file, repeats, environment, changes, made)


def refuse_masked(document: Node, instead: Collection[str] = ()) -> None:
    """Raise ConfigError for secrets that a configuration does not have, because it was written without them.

    ``instead``: keys whose values are not used.
    """
    missing = {
        path: node.where for path, node in _values(document, ()) if path[0] not in instead and is_masked(node.value)
    }
    if not missing:
        return
    names = [_joined(path) for path in missing]
    write = " ".join(f"{name}=…" for name in names)
    raise ConfigError(
        next(iter(missing.values())),
        f"{', '.join(names)} {'are secrets' if names[1:] else 'is a secret'}, which runs do not record. Give "
        f"{'them' if names[1:] else 'it'} again: {write}, on the command line or in the environment variable {VARIABLE}. Or "
        f"write {names[0]}=null, if it is then read from an environment variable of its own, as the webhook's url is from "
        "HOCKET_WEBHOOK_URL.",
    )


def _values(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield every value that is no list or mapping, with its key as an override has it."""
    if not isinstance(node.value, dict | list):
        yield path, node
        return
    found = reference(node, dotted=True) if path and isinstance(node.value, dict) else None
    if found is not None:
        yield from () if found.arguments is None else _values(found.arguments, path)
        return
    children = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
    for name, child in children:
        yield from _values(child, (*path, str(name)))


def without_secrets(change: str, instead: str = "") -> str:
    """Return an override as it is written and shown. ``instead``: what stands in place of a value with a secret."""
    key, equals, text = split(change)
    if not equals:
        return change
    value = parse_value(text, "").plain()
    shown = masked(value, *parts(key))
    return change if shown == value else f"{key}={instead or flow(shown)}"


def of_environment() -> list[str]:
    """Return the overrides in the environment. Raises ConfigError."""
    text = os.environ.get(VARIABLE, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(VARIABLE, f"{error}. Close each quote, as in a shell.") from None  # which may hold secrets


def check_keys(document: Node) -> None:
    """Raise ConfigError for keys that do not exist, with what to write instead."""
    unknown = [(key, node) for key, node in document.value.items() if key not in keys()]
    if unknown:
        (key, node), *others = unknown
        more = [(each, write) for name, each in others if (write := _elsewhere(name, each))]
        said = [_unknown(key, node), *(f"{each.key}: {write}" for each, write in more)]
        raise ConfigError(node.key, " ".join(said))


def _unknown(key: object, node: Node) -> str:
    """Return what is wrong with a key that does not exist, and what to write."""
    known = keys()
    if not str(key if isinstance(key, str) else "")[:1].isalpha():
        about = f"'{key}'" if isinstance(key, str) else f"{flow(key)}, which is not text,"
        near = suggestion(key, known, "A key that only holds an anchor begins with x-, such as x-shared.", 0.7)
        return f"{about} is not a key of a configuration. {near}"
    write = (
        _elsewhere(key, node)
        or suggestion(key, known, "", 0.7)
        or _plugin_key(str(key), node)
        or f"Remove it, or write another. {suggestion(key, known)}"
    )
    return f"'{key}' is not a key of a configuration. {write}"


def _elsewhere(key: object, node: Node) -> str:
    """Return what to write for a key of another library, or for a section with keys of ours or theirs, or empty."""
    override = node.where.startswith("'")
    if isinstance(node.value, dict) and not suggestion(key, keys(), "", 0.85):
        if plugin := _plugin_key(str(key), node):
            return plugin
        inside = [
            spelled(Setting(name, repr(each.plain())), override)
            if name in keys()
            else key_of(str(name), each.plain(), override)
            for name, each in node.value.items()
        ]
        if any(inside):
            return f"Keys stand at the top level here. Instead of '{key}', write {'; '.join(filter(None, inside))}."
    text = key_of(str(key), node.plain(), override)
    return text and f"Instead of '{key}', write {text}."


def _plugin_key(key: str, node: Node) -> str:
    """Return what to write for the name of a plug-in in place of a key, or empty."""
    for argument, kind in KIND_OF_KEY.items():
        there = registry.names(kind)
        name = key if key in there else names.alias(kind, key, there)
        if name in there and kind != "datasets":
            one = {name: node.plain()} if node.value else name
            value = [one] if argument in LISTS else one
            return f"'{name}' is one of the {kind}. Write `{argument}: {flow(value)}`."
    return ""


def override(document: Node, change: str, where: str = "") -> None:
    """Set one value, as typed as in the file. Raises ConfigError if the key cannot be reached.

    Keys are separated by dots: ``optimizer.adamw.lr=0.1``, ``algorithms.ema.half_life=30ba``. Import paths are omitted:
    ``model.width=8`` sets an argument of the model's class. Items of lists are numbered from 0. A part with dots is in
    quotes: ``eval_data."v1.2".count=8``.
    """
    key, equals, text = split(change)
    where = where or f"'{without_secrets(change)}'"
    if not equals or not key:
        what = "An override is key=value, such as duration=2ep or optimizer.adamw.lr=0.1."
        if Path(change).suffix in (".yaml", ".yml") or Path(change).is_file():
            what = (
                f"A command reads one configuration, and this is another file. Write one; {what[0].lower()}{what[1:]}"
            )
        elif change in keys():
            what += f" Write {change}=…."
        elif keys_near := suggestion(key, keys(), "", 0.7):
            what += f" {keys_near}"
        raise ConfigError(where, what)
    path = parts(key)
    last = path.pop()
    node = document
    for depth, name in enumerate(path):
        node = _child(node, name, _joined(path[:depth]), where)
    new, inside = parse_value(text, where), _inside(node, last, _joined(path), where)
    if isinstance(inside.value, list):
        inside.value[_index(inside, last, _joined(path), where)] = new
    else:
        inside.value[last] = new


def split(change: str) -> tuple[str, str, str]:
    """Return the key of an override, ``=`` and its value, as `str.partition`; a part of the key in quotes may have any text."""
    found = re.match(rf"({_PART}(?:\.{_PART})*)(=)(.*)", change, re.DOTALL)
    return (found[1], found[2], found[3]) if found else change.partition("=")


def parts(key: str) -> list[str]:
    """Return the parts of the key of an override, without quotes."""
    found = re.findall(rf"(?:^|\.)({_PART}(?=\.|$)|[^.]*)", key)
    return [each[1:-1] if re.fullmatch('".*"', each) else each for each in found]


def _joined(path: Iterable[object]) -> str:
    """Return the parts of a key as an override has them."""
    return ".".join(f'"{each}"' if re.search(r"[.=\s]|^$", str(each)) else str(each) for each in path)


def _child(node: Node, name: str, at: str, where: str) -> Node:
    inside = _inside(node, name, at, where)
    if (
        at in ("eval_data", "metrics", "train_metrics")
        and inside is node
        and isinstance(node.value, dict)
        and node.value
        and name not in inside.value
    ):
        known, what = [_joined([each]) for each in inside.value], "set" if at == "eval_data" else "metric"
        write = _joined([at, name]) + "=…"
        raise ConfigError(
            where,
            f"{at} has no {what} '{name}'; known: {', '.join(known)}. {suggestion(name, known, '')} To add one, write "
            + (f"'{write}'." if '"' in write else f"{write}."),
        )
    if isinstance(inside.value, list):
        child: Node = inside.value[_index(inside, name, at, where)]
    else:
        child = inside.value.setdefault(name, Node(None, where, where))
    if isinstance(inside.value, list) and not name.isdecimal():  # a plug-in by name: its arguments are next
        if isinstance(child.value, str):
            child.value = dict([forms.from_text(child.value, child, at)])
        return next(iter(child.value.values()))  # type: ignore[no-any-return]
    return child


def _inside(node: Node, name: str, at: str, where: str) -> Node:
    """Return the node in which a name is looked up: a mapping or list, that of the arguments for an object."""
    if node.value is None:
        node.value = {}
    there = isinstance(node.value, dict) and name in node.value  # a name with dots looks like an import path
    found = reference(node, dotted=True) if at and not there else None
    if found and name in ("class_path", "init_args") and "class_path" not in node.plain():
        write = where.strip("'").replace(f"{at}.init_args", at, 1) if name == "init_args" else f"{at}=module:Class"
        raise ConfigError(where, f"{at} is {found.path}, which is written without {name}. Write {write}.")
    if found and name not in ("class_path", "init_args"):
        inner = found.arguments or Node({}, node.where, node.key)
        if not (isinstance(node.value, dict) and "class_path" in node.value):
            node.value = {found.path: inner}
        else:
            node.value["init_args"] = inner
        return inner
    if isinstance(node.value, str) and at.partition(".")[0] in KIND_OF_KEY:
        node.value = dict([forms.from_text(node.value, node, at)])
    if not isinstance(node.value, dict | list):
        raise ConfigError(where, f"{at} is {node.plain()!r}, which has no '{name}'. Write {at}=… to replace it.")
    kind, _, item = at.partition(".")
    one = at in KIND_OF_KEY or (kind in KIND_OF_KEY and item.isdecimal())  # not the arguments of a plug-in
    if isinstance(node.value, dict) and one and len(node.value) == 1 and name not in node.value:
        (given,) = node.value
        write = where.strip("'").replace(f"{at}.", f"{at}.{given}.", 1)
        if any(each.name == name for each in registry.entries(KIND_OF_KEY[kind])):
            write = f"{at}.{given}.…, or {at}={name} to replace it"
        raise ConfigError(where, f"{at} is '{given}', not '{name}'. Write {write}.")
    return node


def _index(node: Node, name: str, at: str, where: str) -> int:
    """Return the index of an item: its number, or the plug-in of this name; the second of a name is name-2, as in the plan."""
    if name.isdecimal() and int(name) < len(node.value):
        return int(name)
    given = [_name(item).rpartition("/")[2] for item in node.value]  # without the distribution
    name = name.rpartition("/")[2]
    called = registry.distinct(given)
    if given.count(name) > 1:
        first = given.index(name)
        second = called[given.index(name, first + 1)]
        inside, rest = (f".{name}", ".…") if f"{name}." in where.partition("=")[0] else ("", "=…")
        raise ConfigError(
            where,
            f"{at} has '{name}' {given.count(name)} times. Write {at}.{first}{inside}{rest} for the first, and "
            f"{at}.{second}{rest} for the second, as the plan calls it.",
        )
    if name in called:
        return called.index(name)
    known = [each for each, its in zip(called, given, strict=True) if its]
    whole = (
        ""
        if at.partition(".")[0] in KIND_OF_KEY
        else f" To add one, give them all: {at}=[{', '.join([*filter(None, given), '…'])}]."
    )
    raise ConfigError(
        where,
        f"{at} has no item '{name}'. {suggestion(name, known)} Items are also numbered from 0, to "
        f"{len(given) - 1}.{whole}",
    )


def _name(item: Node) -> str:
    if isinstance(item.value, str):
        return item.value.partition("(")[0].strip()
    return str(next(iter(item.value))) if isinstance(item.value, dict) and len(item.value) == 1 else ""
