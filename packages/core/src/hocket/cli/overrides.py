"""A configuration file with its overrides: ``key=value`` on the command line, at any depth."""

from __future__ import annotations

import argparse
from typing import Any

from hocket.cli.document import ConfigError, Node, parse_value, read, suggestion
from hocket.cli.imports import reference
from hocket.cli.keys import KINDS, keys
from hocket.plugins import PluginConfigError
from hocket.plugins.spec import parse_spec


def configuration(args: argparse.Namespace) -> Node:
    """Return the file with its overrides applied, and its keys checked."""
    if args.config is None:
        raise PluginConfigError(
            "Name a configuration file, such as config.yaml. `hocket train --print-config > config.yaml` writes one with "
            "every key."
        )
    document = read(args.config)
    for change in args.changes:
        override(document, change)
    for key, node in document.value.items():
        if key not in keys():
            raise ConfigError(node.key, f"'{key}' is not a key of a configuration. {suggestion(key, keys())}")
    return document


def override(document: Node, change: str) -> None:
    """Set one value, as typed as in the file. Raises ConfigError if the key cannot be reached.

    Keys are separated by dots: ``optimizer.adamw.lr=0.1``, ``algorithms.ema.half_life=30ba``. Import paths are omitted:
    ``model.width=8`` sets an argument of the model's class. Items of lists are numbered from 0.
    """
    key, equals, text = change.partition("=")
    where = f"'{change}'"
    if not equals or not key:
        raise ConfigError(where, "An override is key=value, such as duration=2ep or optimizer.adamw.lr=0.1.")
    *path, last = key.split(".")
    node = document
    for depth, name in enumerate(path):
        node = _child(node, name, ".".join(path[:depth]), where)
    new, inside = parse_value(text, where), _inside(node, last, ".".join(path), where)
    if isinstance(inside.value, list):
        inside.value[_index(inside, last, ".".join(path), where)] = new
    else:
        inside.value[last] = new


def _child(node: Node, name: str, at: str, where: str) -> Node:
    inside = _inside(node, name, at, where)
    if (
        at == "eval_data"
        and inside is node
        and isinstance(node.value, dict)
        and node.value
        and name not in inside.value
    ):
        known = ", ".join(map(str, inside.value))
        raise ConfigError(
            where, f"eval_data has no set '{name}'; known: {known}. To add one, write eval_data.{name}=…."
        )
    if isinstance(inside.value, list):
        child: Node = inside.value[_index(inside, name, at, where)]
    else:
        child = inside.value.setdefault(name, Node(None, where, where))
    if isinstance(inside.value, list) and not name.isdecimal():  # a plug-in by name: its arguments are next
        if isinstance(child.value, str):
            child.value = _plugin(child)
        return child.value[name]  # type: ignore[no-any-return]
    return child


def _inside(node: Node, name: str, at: str, where: str) -> Node:
    """Return the node in which a name is looked up: a mapping or list, that of the arguments for an object."""
    if node.value is None:
        node.value = {}
    if name not in ("class_path", "init_args") and at and (found := reference(node, dotted=True)):
        inner = found.arguments or Node({}, node.where, node.key)
        if not (isinstance(node.value, dict) and "class_path" in node.value):
            node.value = {found.path: inner}
        else:
            node.value["init_args"] = inner
        return inner
    if isinstance(node.value, str) and at.partition(".")[0] in KINDS:
        node.value = _plugin(node)
    if not isinstance(node.value, dict | list):
        raise ConfigError(where, f"{at} is {node.plain()!r}, which has no '{name}'. Write {at}=… to replace it.")
    kind, _, item = at.partition(".")
    one = at in KINDS or (kind in KINDS and item.isdecimal())  # not the arguments of a plug-in
    if isinstance(node.value, dict) and one and len(node.value) == 1 and name not in node.value:
        (given,) = node.value
        raise ConfigError(
            where, f"{at} is '{given}', not '{name}'. Write {at}.{given}.…, or {at}={name} to replace it."
        )
    return node


def _plugin(node: Node) -> dict[str, Node]:
    """Return the name and arguments of a plug-in that was written as text."""
    try:
        name, config = parse_spec(node.value)
    except PluginConfigError as error:
        raise ConfigError(node.where, str(error)) from None
    inside = {key: as_node(value, node) for key, value in config.items()}
    return {name: Node(inside, node.where, node.where)}


def as_node(value: Any, of: Node) -> Node:
    """Return a plain value as a node at the place of another."""
    if isinstance(value, dict):
        return Node({key: as_node(each, of) for key, each in value.items()}, of.where, of.where)
    if isinstance(value, list | tuple):
        return Node([as_node(each, of) for each in value], of.where, of.where)
    return Node(value, of.where, of.where)


def _index(node: Node, name: str, at: str, where: str) -> int:
    """Return the index of an item: its number, or the first plug-in of this name."""
    if name.isdecimal() and int(name) < len(node.value):
        return int(name)
    names = [_name(item) for item in node.value]
    if name in names:
        return names.index(name)
    raise ConfigError(
        where, f"{at} has no item '{name}'. {suggestion(name, filter(None, names))} Items are also numbered from 0."
    )


def _name(item: Node) -> str:
    if isinstance(item.value, str):
        return item.value.partition("(")[0].strip()
    return str(next(iter(item.value))) if isinstance(item.value, dict) and len(item.value) == 1 else ""
